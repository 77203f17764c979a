/** The tooltip of the cell under the pointer: both tokens and the exact weight, fetched if the cell is pooled. */

import { type Context, present } from "./context.ts";
import { make, replace } from "./dom.ts";
import type { Field } from "./field.ts";
import type { Need } from "./loader.ts";
import { figure, visible, whole } from "./text.ts";
import { EXACT, type Side, type Size } from "./types.ts";

/** A weight is asked for once the pointer has rested so long. */
const REST = 70;

export class Hover {
  readonly element = make("div", { class: "tip", set: { role: "tooltip", hidden: true } });
  cell?: [number, number];
  private rested = false;
  private timer = 0;
  private saidFor = "";

  constructor(
    private readonly context: Context,
    private readonly field: () => Field,
    private readonly redraw: () => void,
  ) {}

  at(cell: [number, number] | undefined, place: { x: number; y: number }, size: Size): void {
    this.element.hidden = !cell;
    // Beside the pointer, on the side where there is more room.
    const across = place.x < size.width / 2 ? place.x + 16 : place.x - 16;
    this.element.style.left = `${across}px`;
    this.element.style.top = `${Math.min(place.y + 14, size.height - 96)}px`;
    this.element.classList.toggle("before", place.x >= size.width / 2);
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

  leave(): void {
    this.cell = undefined;
    this.element.hidden = true;
    this.redraw();
  }

  /** Part of each look of the panel: asks for what the words need; `pooled` says what is shown in place of weights. */
  look(need: Need, pooled: string | undefined): void {
    const field = this.field();
    const one = (this.context.meta.exact ?? "exact weights").replace("weights", "weight");
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
    }
    this.sayChosen(need);
  }

  /** The chosen cell is announced once its weight is known. */
  private sayChosen(need: Need): void {
    const { at } = this.context.state();
    if (!at) {
      this.saidFor = "";
      return;
    }
    const field = this.field();
    if (at[0] >= field.map.queries || at[1] >= field.map.keys) return;
    const told = describe(this.context, field, at, need, need);
    const words = `${told.query} · ${told.key} · ${told.value}`;
    if (words === this.saidFor) return;
    this.saidFor = words;
    this.context.announce(words);
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

export function describe(
  context: Context,
  field: Field,
  [row, column]: [number, number],
  weightNeed: Need,
  tokenNeed: Need,
): { query: string; key: string; value: string } {
  const token = (side: Side, index: number): string => {
    const own = context.tokens.at(tokenNeed, field.mapIndex, side, index);
    // Of the other atlas it is there where its own map is shown beside.
    const [, second] = field.heads;
    const beside = second && second.context !== context;
    const other = beside && second.context.tokens.at(present(second.context.loader), second.mapIndex, side, index);
    if (own === undefined) return "…";
    return other && other !== own ? `${visible(own, 20)} | ${visible(other, 20)}` : visible(own, 28);
  };
  const weight = field.offers(EXACT) ? field.value(weightNeed, row, column) : undefined;
  const unknown = field.offers(EXACT) ? "…" : "not in this page";
  return {
    query: `query ${whole(row)}  ${token("query", row)}`,
    key: `key ${whole(column)}  ${token("key", column)}`,
    value: weight === undefined ? unknown : weightWords(weight),
  };
}
