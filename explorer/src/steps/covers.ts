/** "Predict, then reveal": which numbers of an answer are covered, and the order in which they are revealed. */

import type { StepTable } from "./answers.ts";

/** The name of a number: its table, row and column; the column "sum" or row "sum" for totals, row "" for a heading. */
export function cellId(table: string, row: string | number, column: string | number): string {
  return `${table} ${row} ${column}`;
}

/** The numbers of a table, row by row, in the order in which a class predicts them. */
export function cellsOf(table: StepTable): string[] {
  const ids: string[] = [];
  table.rows.forEach(({ cells }, row) => {
    cells.forEach((cell, column) => {
      if (cell === null) return;
      // The words of a prediction are predicted, too.
      if (table.key === "prediction" && row === 0) ids.push(cellId(table.key, "", column));
      ids.push(cellId(table.key, row, column));
    });
    if (table.sums === "rows") ids.push(cellId(table.key, row, "sum"));
  });
  if (table.sums === "columns")
    table.totals?.forEach((total, column) => total !== null && ids.push(cellId(table.key, "sum", column)));
  return ids;
}

/** The covered numbers of an answer; none unless the class predicts. */
export class Covers {
  private readonly order: { table: string; id: string }[];
  private readonly hidden: Set<string>;

  constructor(tables: StepTable[], predict: boolean) {
    const covered = predict ? tables.filter(({ given }) => !given) : [];
    this.order = covered.flatMap((table) => cellsOf(table).map((id) => ({ table: table.key, id })));
    this.hidden = new Set(this.order.map(({ id }) => id));
  }

  get left(): number {
    return this.hidden.size;
  }

  has(id: string): boolean {
    return this.hidden.has(id);
  }

  /** Whether a number of the table is still covered. */
  any(table: string): boolean {
    return this.order.some((one) => one.table === table && this.hidden.has(one.id));
  }

  /** The first number that is covered. */
  get next(): { table: string; id: string } | undefined {
    return this.order.find(({ id }) => this.hidden.has(id));
  }

  reveal(id: string): void {
    this.hidden.delete(id);
  }

  revealTable(table: string): void {
    for (const one of this.order) if (one.table === table) this.hidden.delete(one.id);
  }

  revealAll(): void {
    this.hidden.clear();
  }
}
