/** "Predict, then reveal": what a class predicted before a number was revealed, and how often it was right. */

import { cellId } from "./covers.ts";
import type { StepTable } from "./answers.ts";

/** Half of the second digit after the point, as sheets are marked. */
const CLOSE = 0.005;

/** The number that a text says, as it is usually written: 0.5, 0,5, 1/2, -∞; NaN of another text. */
export function numberOf(text: string): number {
  const plain = text.replace(/\s/g, "").replaceAll("−", "-").replaceAll("∞", "Infinity").replace(",", ".");
  const [above, below] = plain.split("/");
  if (!above || below === "") return Number.NaN;
  return below === undefined ? Number(above) : Number(above) / Number(below);
}

/** Whether a prediction is what was revealed: a number within 0.005, or the same word. */
export function isHit(prediction: string, revealed: string): boolean {
  const [guess, answer] = [numberOf(prediction), numberOf(revealed)];
  if (!Number.isNaN(answer)) return guess === answer || Math.abs(guess - answer) <= CLOSE;
  return prediction.trim().toLowerCase() === revealed.trim().toLowerCase();
}

/** The text of a number by its name, of `cellId`. */
export function textOf(tables: StepTable[], id: string): string {
  for (const table of tables) {
    for (const [column, name] of table.columns.entries()) {
      if (id === cellId(table.key, "", column)) return String(name);
      if (id === cellId(table.key, "sum", column)) return shown(table.totals?.[column]);
    }
    for (const [row, { cells }] of table.rows.entries()) {
      const column = cells.findIndex((_, at) => id === cellId(table.key, row, at));
      if (column >= 0) return shown(cells[column]);
      if (id === cellId(table.key, row, "sum")) return shown(table.totals?.[row]);
    }
  }
  return "";
}

/** A number without what it was before a change. */
function shown(cell: string | string[] | null | undefined): string {
  return Array.isArray(cell) ? cell[0] : (cell ?? "");
}

/** Predictions of a class, by the name of what was predicted. */
export class Guesses {
  private readonly hits = new Map<string, boolean>();

  /** Notes a prediction, and whether it was right. */
  note(id: string, prediction: string, revealed: string): boolean {
    const hit = isHit(prediction, revealed);
    this.hits.set(id, hit);
    return hit;
  }

  get made(): number {
    return this.hits.size;
  }

  get right(): number {
    return [...this.hits.values()].filter(Boolean).length;
  }

  /** Whether the prediction was right; undefined where there was none. */
  of(id: string): boolean | undefined {
    return this.hits.get(id);
  }
}
