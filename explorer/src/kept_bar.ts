/** The bar that says in every view what is kept, lets it go, and leads to the heads that it is strongest in. */

import { type Context, shownHead } from "./context.ts";
import { button, make, replace } from "./dom.ts";
import { isNothing, type Kept, keptText, NOTHING, sameKept, SIDES, toggled } from "./kept.ts";
import { keptMeaning, keptValue } from "./kept_values.ts";
import type { Need } from "./loader.ts";
import { KEPT_ORDERS } from "./ordering.ts";
import { showsOneHead } from "./state.ts";
import { figure, visible, whole } from "./text.ts";
import type { Side } from "./types.ts";

const HINT = "Nothing is kept. Click or tap a token or a cell, or press g: it stays in all views, and heads are ordered by it.";
/** What each side is called: of a translation they are two texts. */
const SIDE_WORDS = { self: { query: "query", key: "key" }, cross: { query: "target", key: "source" } } as const;

export class KeptBar {
  readonly element = make("section", { class: "kept bar", set: { "aria-label": "what is kept" } });
  private built = "";
  /** What is said until something else is kept. */
  private note?: { words: string; kept: Kept };

  constructor(private readonly context: Context) {}

  /** With every frame: tokens and weights come later. */
  update(): void {
    this.context.loader.frame(this, (need) => this.build(need));
  }

  /** Says something about what is kept now. */
  say(words: string): void {
    this.note = { words, kept: this.context.state().at };
    this.update();
  }

  private build(need: Need): void {
    const { at, map, view, measure } = this.context.state();
    const head = shownHead(this.context);
    const tokens = SIDES.flatMap((side) => at[side].map((index) => this.token(need, map, side, index)));
    const value = this.value(need, { map, head }, at);
    const note = this.note && sameKept(this.note.kept, at) ? this.note.words : "";
    const made = JSON.stringify([keptText(at), map, view, measure, tokens.map(({ words }) => words), value, note]);
    if (made === this.built) return;
    this.built = made;
    if (isNothing(at)) return replace(this.element, make("span", { class: "muted", set: { role: "status" } }, note || HINT));
    const focused = this.element.contains(document.activeElement);
    const heads = button("Order heads by it", () => this.context.update({ view: "grid", order: `-${KEPT_ORDERS[measure]}` }), {
      set: { title: keptMeaning(at, measure) },
    });
    replace(
      this.element,
      make("strong", {}, "Kept"),
      ...tokens.map((token) => this.chip(token)),
      value && make("span", { class: "kept-value", set: { title: keptMeaning(at, measure) } }, value),
      heads,
      button("Let go", () => this.context.update({ at: NOTHING }), { set: { title: "keep nothing (Backspace)" } }),
      note && make("span", { class: "muted", set: { role: "status" } }, note),
    );
    if (focused && !this.element.contains(document.activeElement)) heads.focus();
  }

  private token(need: Need, map: number, side: Side, index: number): Token {
    const found = this.context.tokens.at(need, map, side, index);
    const token = found === undefined ? "…" : visible(found, 24);
    return { side, index, words: `${SIDE_WORDS[this.context.meta.maps[map].kind][side]} ${whole(index)}  ${token}` };
  }

  private chip({ side, index, words }: Token): HTMLElement {
    const press = button("", () => this.context.update({ at: toggled(this.context.state().at, side, index, true) }), {
      class: "chip",
    });
    const close = make("span", { set: { "aria-hidden": "true" } }, "  ×");
    press.append(make("span", { class: "told" }, "let go of "), words, close);
    return press;
  }

  /** What the head that is shown has of it. */
  private value(need: Need, head: { map: number; head: number }, at: Kept): string {
    if (isNothing(at) || !showsOneHead(this.context.state())) return "";
    const value = keptValue(need, this.context, head, { kept: at });
    if (value === undefined) return "…";
    if (value === Infinity) return "NaN";
    return Number.isNaN(value) ? `no ${this.context.state().measure}` : figure(value);
  }
}

interface Token {
  side: Side;
  index: number;
  words: string;
}
