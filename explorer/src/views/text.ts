/** The text itself, wrapped, each token shaded by what the kept tokens attend to, or by how it attends to them. */

import { type Context, headTitle, keptOf, shownHead, type ViewPart } from "../context.ts";
import { button, make, replace, select, toggle } from "../dom.ts";
import { csvOf } from "../exports.ts";
import { HeadField } from "../field.ts";
import { toggled } from "../kept.ts";
import type { Need } from "../loader.ts";
import { runningText } from "../running_text.ts";
import { type Shading, shading, SINK, type Window } from "../shading.ts";
import { figure, visible, whole } from "../text.ts";
import { EXACT, type Side } from "../types.ts";
import { Aside } from "./aside.ts";
import { wordToggle } from "./controls.ts";
import { headControls } from "./heads_shown.ts";
import { measureControls } from "./measures.ts";

/** So many tokens of a text stand in the page at a time. */
export const TOKENS_SHOWN = 1000;

export class TextView implements ViewPart {
  readonly element = make("div", { class: "text-view" });
  private readonly bar = make("div", { class: "bar" });
  private readonly told = make("p", { class: "shading", set: { role: "status" } });
  private readonly texts = make("div", { class: "texts" });
  private readonly aside: Aside;
  /** Whether a press keeps a token beside those that are kept. */
  private several = false;
  private shown?: Shading;
  private built = "";
  private barBuilt = "";
  private readonly spans = new Map<Side, { first: number; all: HTMLElement[] }>();

  constructor(private readonly context: Context) {
    this.aside = new Aside(context);
    const body = make("div", { class: "text-body" }, this.texts, this.aside.element);
    this.element.append(this.bar, this.told, body);
    this.texts.addEventListener("click", (event) => this.keep(event));
    this.texts.addEventListener("keydown", (event) => this.step(event));
  }

  update(): void {
    this.controls();
    this.redraw();
  }

  redraw(): void {
    const field = this.field();
    this.aside.update(field);
    this.context.loader.frame(this, (need) => this.draw(need, field));
  }

  reveal(): void {
    const { at, window } = this.context.state();
    const place = (side: Side, start: number) => {
      const index = at[side].at(-1);
      const { start: from, stop } = this.window(side);
      return index === undefined || (index >= from && index < stop) ? start : Math.max(0, index - TOKENS_SHOWN / 2);
    };
    const to: [number, number] = [place("query", window[0]), place("key", window[1])];
    if (String(to) !== String(window)) this.context.update({ window: to });
  }

  key(event: KeyboardEvent): boolean {
    if (event.key !== "PageDown" && event.key !== "PageUp") return false;
    this.turn(event.key === "PageDown" ? 1 : -1);
    return true;
  }

  /** A line for each token in sight: its number, itself, what it is shaded by. */
  async csv(): Promise<string> {
    const side = this.shadedSide();
    const { start, stop } = this.window(side);
    const tokens = await this.context.tokens.range(this.context.state().map, side, start, stop);
    const value = (at: number) => (this.shown?.hidden.has(start + at) && side === "key" ? "hidden" : (this.shown?.values[at] ?? NaN));
    return csvOf([["index", "token", this.context.state().measure], ...tokens.map((token, at) => [start + at, visible(token), value(at)])]);
  }

  destroy(): void {
    this.aside.destroy();
    this.context.loader.release(this);
  }

  private field(): HeadField {
    return new HeadField(this.context, this.context.state().map, shownHead(this.context));
  }

  /** Whether queries and keys are one text. */
  private isOneText(): boolean {
    const { kind, texts } = this.context.meta.maps[this.context.state().map];
    return texts ? texts[0] === texts[1] : kind === "self";
  }

  /** The side whose tokens are shaded. */
  private shadedSide(): Side {
    return this.context.state().direction === "query" ? "key" : "query";
  }

  private window(side: Side): Window {
    const { map, window } = this.context.state();
    const count = this.context.tokens.count(map, side);
    // One text has one window, whichever side is kept.
    const first = this.isOneText() ? Math.max(...window) : window[side === "query" ? 0 : 1];
    const start = Math.min(first, Math.max(0, count - TOKENS_SHOWN));
    return { start, stop: Math.min(start + TOKENS_SHOWN, count) };
  }

  private controls(): void {
    const state = this.context.state();
    const made = JSON.stringify([state.direction, state.hide, state.words, state.mean, state.rows, state.pins, state.map, state.window, this.several]);
    if (made === this.barBuilt) return;
    this.barBuilt = made;
    const directions = [
      { value: "query", label: "what it attends to" },
      { value: "key", label: "what attends to it" },
    ];
    const all = "button, select";
    const focused = [...this.bar.querySelectorAll(all)].indexOf(document.activeElement as Element);
    const hidden = `leave out special tokens and keys with at least ${100 * SINK} % of all weight, and divide the rest of each row by what is left`;
    replace(
      this.bar,
      ...headControls(this.context),
      select("Of what is kept", directions, state.direction, (direction) => this.turned(direction as Side)),
      toggle("Several", this.several, () => this.setSeveral(), "a press keeps a token beside those that are kept, as with Shift"),
      // A sink has weight and little contribution; rows of contributions have no sum to divide by.
      ...(state.measure === "weight" ? [toggle("Hide sinks", state.hide, () => this.context.update({ hide: !this.context.state().hide }), hidden)] : []),
      ...measureControls(this.context),
      wordToggle(this.context),
      ...this.pages(),
    );
    if (focused >= 0) (this.bar.querySelectorAll(all)[focused] as HTMLElement | undefined)?.focus();
  }

  private setSeveral(): void {
    this.several = !this.several;
    this.controls();
  }

  /** The other direction; of one text the same tokens stay. */
  private turned(direction: Side): void {
    const { at } = this.context.state();
    if (!this.isOneText()) return this.context.update({ direction });
    const other = direction === "query" ? "key" : "query";
    const kept = at[direction].length ? at : { ...at, [direction]: at[other], [other]: [] };
    this.context.update({ direction, at: kept });
  }

  /** Where a text is longer than what is shown of it. */
  private pages(): HTMLElement[] {
    const { map } = this.context.state();
    const count = Math.max(this.context.tokens.count(map, "query"), this.context.tokens.count(map, "key"));
    if (count <= TOKENS_SHOWN) return [];
    const { start, stop } = this.window(this.shadedSide());
    const step = (label: string, by: number, title: string) =>
      button(label, () => this.turn(by), { class: "square", set: { "aria-label": title, title: `${title} (${by < 0 ? "PageUp" : "PageDown"})` } });
    const words = make("span", { class: "muted" }, `tokens ${whole(start)}–${whole(stop - 1)} of ${whole(count)}`);
    return [step("‹", -1, "the tokens before"), words, step("›", 1, "the tokens behind")];
  }

  private turn(by: number): void {
    const { map } = this.context.state();
    const moved = (side: Side) => {
      const last = Math.max(0, this.context.tokens.count(map, side) - TOKENS_SHOWN);
      return Math.min(Math.max(this.window(side).start + by * TOKENS_SHOWN, 0), last);
    };
    this.context.update({ window: [moved("query"), moved("key")] });
  }

  private draw(need: Need, field: HeadField): void {
    const state = this.context.state();
    const sides: Side[] = this.isOneText() ? [this.shadedSide()] : ["query", "key"];
    const tokens = sides.map((side) => this.tokens(need, side));
    if (!tokens.every((all) => all !== undefined)) return;
    const made = JSON.stringify([sides, state.map, state.words, state.rows, state.atlas, sides.map((side) => this.window(side))]);
    if (made !== this.built) {
      this.built = made;
      this.spans.clear();
      replace(this.texts, ...sides.map((side, at) => this.text(side, tokens[at] as string[])));
    }
    const options = { direction: state.direction, hide: state.hide && state.measure === "weight", window: this.window(this.shadedSide()) };
    this.shown = shading(need, this.context, field, keptOf(this.context, field.mapIndex), options);
    this.shade();
    this.say(field);
  }

  private tokens(need: Need, side: Side): string[] | undefined {
    const { start, stop } = this.window(side);
    const { map } = this.context.state();
    const found = Array.from({ length: stop - start }, (_, at) => this.context.tokens.at(need, map, side, start + at));
    return found.every((token) => token !== undefined) ? (found as string[]) : undefined;
  }

  private text(side: Side, tokens: string[]): HTMLElement {
    const { kind } = this.context.meta.maps[this.context.state().map];
    const name = this.isOneText() ? "text" : kind === "cross" ? (side === "query" ? "target" : "source") : side;
    const paragraph = make("p", { class: "running", set: { lang: "", "aria-label": name, role: "group", "data-side": side } });
    const first = this.window(side).start;
    const all = runningText(tokens).map(({ text, before }, at) => {
      const span = make("span", { class: "token", set: { role: "button", tabindex: at ? -1 : 0, "data-index": first + at } }, text);
      if (before) paragraph.append(before);
      paragraph.append(span);
      return span;
    });
    this.spans.set(side, { first, all });
    return make("section", {}, nameOf(this.isOneText(), name), paragraph);
  }

  /** Shades of the tokens, frames round those that are kept, and both in words. */
  private shade(): void {
    const kept = keptOf(this.context, this.context.state().map);
    const shaded = this.shadedSide();
    const most = Math.max(0, ...[...(this.shown?.values ?? [])].filter(Number.isFinite));
    for (const [side, { first, all }] of this.spans) {
      const frames = new Set(this.isOneText() ? [...kept.query, ...kept.key] : kept[side]);
      all.forEach((span, at) => {
        const index = first + at;
        const value = side === shaded ? (this.shown?.values[at] ?? NaN) : NaN;
        const out = (side === "key" || this.isOneText()) && (this.shown?.hidden.has(index) ?? false);
        const part = value > 0 && Number.isFinite(value) && most > 0 ? Math.round(100 * Math.sqrt(value / most)) : 0;
        span.style.setProperty("--part", `${part}%`);
        span.classList.toggle("hidden-token", out);
        span.setAttribute("aria-pressed", String(frames.has(index)));
        const words = out && side === "key" ? "hidden" : value === Infinity ? "NaN" : Number.isNaN(value) ? "" : figure(value);
        span.title = `${whole(index)}${words ? `: ${words}` : ""}`;
      });
    }
  }

  private say(field: HeadField): void {
    const { direction, hide, map, measure } = this.context.state();
    const count = keptOf(this.context, map)[direction].length;
    const title = headTitle(this.context, map, field.head);
    let words = `${title}: `;
    if (!field.offers(EXACT)) words += "the exact weights of this head are not in this page.";
    else if (!count) words += "press a token to keep it, and see what it attends to.";
    else if (!this.shown) words += "…";
    else {
      const kept = count > 1 ? `${whole(count)} kept tokens` : "the kept token";
      words +=
        measure === "contribution"
          ? `shaded by the contribution ${direction === "query" ? "to" : "of"} ${kept}`
          : direction === "query"
            ? `shaded by the weight that ${kept} give${count > 1 ? "" : "s"}`
            : `shaded by the weight on ${kept}`;
      words += count > 1 ? (direction === "query" ? ", their mean." : ", summed.") : ".";
      if (hide && measure === "weight") words += this.hiddenWords();
    }
    if (this.told.textContent !== words) this.told.textContent = words;
  }

  private hiddenWords(): string {
    if (!this.shown?.hidden.size) return " No sink and no special token is here to hide.";
    const { hidden, names, share } = this.shown;
    const named = names.join(", ") + (hidden.size > names.length ? `, and ${whole(hidden.size - names.length)} more` : "");
    return ` Hidden: ${named}, ${(100 * share).toFixed(1)} % of the weight; the rest of each row is shown as 100 %.`;
  }

  private keep(event: MouseEvent): void {
    const token = (event.target as Element).closest<HTMLElement>(".token");
    if (token) this.press(token, event.shiftKey || this.several);
  }

  private press(token: HTMLElement, several: boolean): void {
    const { at, direction } = this.context.state();
    const own = token.closest<HTMLElement>("[data-side]")?.dataset.side as Side;
    // Of two texts the one that is pressed says the direction.
    const side = this.isOneText() ? direction : own;
    this.context.update({ direction: side, at: toggled(at, side, Number(token.dataset.index), several) });
  }

  private step(event: KeyboardEvent): void {
    const token = (event.target as Element).closest<HTMLElement>(".token");
    const all = [...this.texts.querySelectorAll<HTMLElement>(".token")];
    if (!token) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
    if (event.key === "Enter" || event.key === " ") this.press(token, event.shiftKey || this.several);
    else if (step) {
      const next = all[Math.min(Math.max(all.indexOf(token) + step, 0), all.length - 1)];
      token.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  }
}

/** Above a text its name, where there are two. */
function nameOf(alone: boolean, name: string): HTMLElement | undefined {
  return alone ? undefined : make("h3", { class: "muted" }, name);
}
