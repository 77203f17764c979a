/** One step as a section with its table, with covers over the numbers that a class predicts. */

import { button, make } from "../dom.ts";
import type { Cell, StepTable } from "./answers.ts";
import { cellId, type Covers } from "./covers.ts";
import type { Language } from "./page_state.ts";
import type { Say } from "./page_words.ts";

export interface TableLook {
  language: Language;
  say: Say;
  covers: Covers;
  /** Whether a number was predicted rightly; undefined where it was not predicted. */
  hit(id: string): boolean | undefined;
  /** A covered number is clicked. */
  reveal(id: string): void;
  revealTable(table: string): void;
}

/** Where the number in front of a title ends: "2. Attention weights". */
export function stepNumber(title: string): string {
  return /^(\d+)\. /.exec(title)?.[1] ?? "";
}

/** A formula with what stands behind "_" as a subscript: "a_ij", "y_{t-1}". */
export function subscripted(text: string): (Node | string)[] {
  return subscripts(text).map(({ text, below }) => (below ? make("sub", {}, text) : text));
}

export function subscripts(text: string): { text: string; below: boolean }[] {
  return text
    .split(/(_\{[^}]*\}|_[A-Za-z0-9]+)/)
    .map((part, at) => ({ text: at % 2 ? part.replace(/[_{}]/g, "") : part, below: at % 2 === 1 }))
    .filter(({ text }) => text);
}

export function tableSection(table: StepTable, look: TableLook): HTMLElement {
  const { language, say, covers } = look;
  const covered = covers.any(table.key);
  const title = table.title[language] || table.title.en;
  const number = stepNumber(title);
  const heading = make(
    "h2",
    { set: { tabindex: -1 } },
    number ? make("span", { class: "number" }, number) : undefined,
    ...subscripted(number ? title.slice(number.length + 2) : title),
  );
  const scroller = make("div", { class: "scroller", set: { tabindex: 0, role: "region", "aria-label": title } });
  scroller.append(numbers(table, look));
  return make(
    "section",
    { class: number ? "step numbered" : "step", set: { id: `step-${table.key}` } },
    heading,
    make("p", { class: "formula" }, ...subscripted(table.formula)),
    scroller,
    covered
      ? button(say("revealTable"), () => look.revealTable(table.key), {
          class: "reveal-table",
          set: { "aria-label": `${say("revealTable")}: ${title}` },
        })
      : undefined,
    !covered && table.example ? make("p", { class: "by-hand" }, `${say("byHand")}: ${table.example}`) : undefined,
    !covered && table.note ? make("p", { class: "note" }, table.note[language] || table.note.en) : undefined,
  );
}

function numbers(table: StepTable, look: TableLook): HTMLTableElement {
  const { say } = look;
  const sums = table.sums === "rows";
  const gaps = table.columns.filter((name) => typeof name === "number").length;
  const heads = table.columns.map((name, at) => {
    if (typeof name === "string") return headCell(table, name, at, look);
    const text = gaps > 2 ? "…" : say("more", String(name));
    return make("th", { class: "more", set: { scope: "col" } }, text);
  });
  if (sums) heads.push(make("th", { class: "sum", set: { scope: "col" } }, say("sum")));
  const shares = table.key.split(".").at(-1) === "weights";
  const line = (name: string, row: string | number, cells: (Cell | null)[]) =>
    cells.map((cell, column) =>
      cell === null
        ? make("td", { class: "more" })
        : numberCell(
            cell,
            cellId(table.key, row, column),
            `${name}, ${table.columns[column]}`,
            look,
            shares && row !== "sum",
          ),
    );
  const rows = table.rows.map(({ name, cells }, row) => {
    const tds = line(name, row, cells);
    if (sums) {
      const total = table.totals?.[row] ?? "";
      const td = numberCell(total, cellId(table.key, row, "sum"), `${name}, ${say("sum")}`, look, false);
      td.classList.add("sum");
      tds.push(td);
    }
    return make("tr", {}, make("th", { set: { scope: "row" } }, shownToken(name, say)), ...tds);
  });
  if (table.sums === "columns" && table.totals) {
    const tds = line(say("sum"), "sum", table.totals);
    rows.push(make("tr", { class: "sum" }, make("th", { set: { scope: "row" } }, say("sum")), ...tds));
  }
  return make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...heads)), make("tbody", {}, ...rows));
}

function headCell(table: StepTable, name: string, column: number, look: TableLook): HTMLTableCellElement {
  const id = cellId(table.key, "", column);
  const text = shownToken(name, look.say);
  return make("th", { set: { scope: "col" } }, look.covers.has(id) ? cover(id, String(column + 1), look) : text);
}

function numberCell(cell: Cell, id: string, what: string, look: TableLook, share: boolean): HTMLTableCellElement {
  if (look.covers.has(id)) return make("td", {}, cover(id, what, look));
  const [text, before] = typeof cell === "string" ? [cell, undefined] : cell;
  const hit = look.hit(id);
  const td = make("td", { class: hit === undefined ? undefined : hit ? "hit" : "miss", set: { "data-id": id } });
  if (before === undefined) td.append(text);
  else td.append(...changed(text, before, look.say));
  if (share) {
    td.classList.add("share");
    td.style.setProperty("--share", `${100 * Math.min(Math.max(Number(text), 0), 1)}%`);
  }
  return td;
}

/** A number that changed, and below it, struck out, what it was. */
export function changed(text: string, before: string, say: Say): Node[] {
  const mark = make("mark", {}, text);
  if (!before || before === text) return [mark];
  return [mark, make("del", { set: { title: say("was", before) } }, before)];
}

function cover(id: string, what: string, look: TableLook): HTMLButtonElement {
  return button("?", () => look.reveal(id), {
    class: "cover",
    set: { "aria-label": look.say("covered", what), "data-id": id },
  });
}

/** A token as it is read: the beginning and the end of a sentence in words. */
export function shownToken(token: string, say: Say): string {
  return token === "</s>" ? say("end") : token === "<s>" ? say("begin") : token;
}
