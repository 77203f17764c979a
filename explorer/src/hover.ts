/** The tooltip of the cell under the pointer: both tokens and the exact weight, fetched if the cell is pooled. */

import { type Context, keptOf, present } from "./context.ts";
import { make, replace } from "./dom.ts";
import type { Field } from "./field.ts";
import { type Kept, onePair } from "./kept.ts";
import type { Need } from "./loader.ts";
import { figure, visible, whole } from "./text.ts";
import { EXACT, type Side, type Size } from "./types.ts";

/** A weight is asked for once the pointer has rested so long. */
const REST = 70;

export class Hover {
  readonly element = make("div", { class: "tip", set: { role: "tooltip", hidden: true } });
  cell?: [number, number];
  private place = { x: 0, y: 0, size: { width: 0, height: 0 } };
  private rested = false;
  private timer = 0;
  /** What is kept, in words; "" where nothing is. */
  kept = "";

  constructor(
    private readonly context: Context,
    private readonly field: () => Field,
    private readonly redraw: () => void,
  ) {}

  at(cell: [number, number] | undefined, place: { x: number; y: number }, size: Size): void {
    this.element.hidden = !cell;
    this.place = { ...place, size };
    this.fit();
    if (String(cell) === String(this.cell)) return;
    this.cell = cell;
    this.rested = false;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      this.rested = true;
      this.redraw();
    }, REST);
    this.redraw();
  }

  /** Beside the pointer, on the side where there is more room, and inside of the panel. */
  private fit(): void {
    const { x, y, size } = this.place;
    const { offsetWidth, offsetHeight } = this.element;
    const left = x < size.width / 2 ? x + 16 : x - 16 - offsetWidth;
    const held = (start: number, room: number) => Math.max(4, Math.min(start, room - 4));
    this.element.style.left = `${held(left, size.width - offsetWidth)}px`;
    this.element.style.top = `${held(y + 14, size.height - offsetHeight)}px`;
  }

  leave(): void {
    this.cell = undefined;
    this.element.hidden = true;
    this.redraw();
  }

  /** Part of each look of the panel: asks for what the words need; `pooled` says what is shown in place of weights. */
  look(need: Need, pooled: string | undefined): void {
    const field = this.field();
    const one = (this.context.meta.exact ?? "exact weights").replace(/(weight|contribution)s/, "$1");
    if (this.cell) {
      const peek: Need = (key) => this.context.loader.peek(key);
      const told = describe(this.context, field, this.cell, this.rested ? need : peek, need);
      replace(
        this.element,
        make("span", { class: "tip-token" }, told.query),
        make("span", { class: "tip-token" }, told.key),
        make("strong", {}, told.value),
        make("span", { class: "muted" }, `${one}${pooled ? `; shown: ${pooled}` : ""}`),
      );
      this.fit();
    }
    this.sayKept(need);
  }

  /** What is kept is announced once its weight is known. */
  private sayKept(need: Need): void {
    const words = keptWords(this.context, this.field(), keptOf(this.context, this.field().mapIndex), need);
    if (words === this.kept) return;
    this.kept = words;
    if (words) this.context.announce(words);
  }

  destroy(): void {
    clearTimeout(this.timer);
    this.context.loader.release(this);
  }
}

/** A weight as sources give it, in words. */
export function weightWords(weight: number): string {
  if (Number.isNaN(weight)) return "no pair: the mask forbids it";
  return Number.isFinite(weight) ? figure(weight) : "NaN: this query attends to NaN or infinity";
}

/** What is kept of a map, in words: the tokens, and of one pair its weight. */
function keptWords(context: Context, field: Field, kept: Kept, need: Need): string {
  const one = onePair(kept);
  if (one) {
    const told = describe(context, field, one, need, need);
    return `${told.query} · ${told.key} · ${told.value}`;
  }
  const named = (side: Side) =>
    kept[side].map((index) => `${side} ${whole(index)}  ${tokenWords(context, field, side, index, need)}`);
  return [...named("query"), ...named("key")].join(" · ");
}

export function describe(
  context: Context,
  field: Field,
  [row, column]: [number, number],
  weightNeed: Need,
  tokenNeed: Need,
): { query: string; key: string; value: string } {
  const token = (side: Side, index: number) => tokenWords(context, field, side, index, tokenNeed);
  const there = field.offers(EXACT, { row0: row, row1: row + 1, column0: column, column1: column + 1 });
  const weight = there ? field.value(weightNeed, row, column) : undefined;
  const unknown = there ? "…" : "not in this page";
  return {
    query: `query ${whole(row)}  ${token("query", row)}`,
    key: `key ${whole(column)}  ${token("key", column)}`,
    value: weight === undefined ? unknown : weightWords(weight),
  };
}

/** A token; of a difference of two atlases both, where they are not the same. */
function tokenWords(context: Context, field: Field, side: Side, index: number, need: Need): string {
  const own = context.tokens.at(need, field.mapIndex, side, index);
  // Of the other atlas it is there where its own map is shown beside.
  const [, second] = field.heads;
  const beside = second && second.context !== context;
  const other = beside && second.context.tokens.at(present(second.context.loader), second.mapIndex, side, index);
  if (own === undefined) return "…";
  return other && other !== own ? `${visible(own, 20)} | ${visible(other, 20)}` : visible(own, 28);
}
