/**
 * Up to six heads, A to F, or one of two atlases, side by side and moved together; and the difference A − B. Where none
 * is pinned the chosen head stands alone.
 */

import { sameHead } from "../atlases.ts";
import type { Context, ViewPart } from "../context.ts";
import { button, make, replace, toggle } from "../dom.ts";
import { DifferenceField, type Field, HeadField, sameShape } from "../field.ts";
import { Panel } from "../panel.ts";
import { cutToWidth, type Picture, type Shape } from "../shapes.ts";
import { pinned, type Pin } from "../state.ts";
import { heatControls } from "./controls.ts";
import { Differing } from "./token_differences.ts";

/** Before the titles of the heads, so that A − B says which it subtracts. */
const LETTERS = "ABCDEF";

interface Pane {
  name: string;
  panel: Panel;
  element: HTMLElement;
}

export class CompareView implements ViewPart {
  readonly element = make("div", { class: "compare-view" });
  private readonly bar = make("div", { class: "bar" });
  private readonly body = make("div", { class: "panes" });
  private readonly hint = make("p", { class: "hint", set: { role: "status", hidden: true } });
  private readonly differing = new Differing();
  private panes: Pane[] = [];
  private built = "";

  constructor(private readonly context: Context) {
    this.element.append(this.bar, this.differing.element, this.hint, this.body);
  }

  get panel(): Panel | undefined {
    return this.panes[0]?.panel;
  }

  update(): void {
    const state = this.context.state();
    const made = JSON.stringify([
      state.pins,
      [state.against, state.map, state.head],
      state.difference,
      state.scale,
      state.reduce,
      state.normalise,
      state.clip,
      state.sight,
      state.alignment,
      state.words,
    ]);
    if (made !== this.built) {
      this.built = made;
      this.build();
    }
    this.redraw();
  }

  redraw(): void {
    for (const { panel } of this.panes) panel.draw();
  }

  reveal(): void {
    this.panel?.reveal();
  }

  picture(): Picture {
    const origin = this.body.getBoundingClientRect();
    const shapes: Shape[] = this.panes.flatMap(({ panel, element }): Shape[] => {
      const { left, top, width, height } = panel.element.getBoundingClientRect();
      const [x, y] = [left - origin.left, top - origin.top];
      const heading = element.querySelector("h2")?.textContent ?? "";
      const title = cutToWidth(heading, width - 16, { bold: true });
      return [
        { kind: "text", x: x + 8, y: y - 12, text: title, colour: this.context.palette().ink, bold: true },
        { kind: "group", x, y, clip: { x: 0, y: 0, width, height }, shapes: panel.picture().shapes },
      ];
    });
    return { title: "heads compared", width: origin.width, height: origin.height, shapes };
  }

  destroy(): void {
    for (const { panel } of this.panes) panel.destroy();
    this.differing.destroy();
  }

  /** The panels that are wanted; those that are there already are kept with all they have drawn. */
  private build(): void {
    const state = this.context.state();
    const heads = this.heads();
    // Heads of two atlases are told apart by these.
    const letter = (at: number) => (state.against === undefined ? `${LETTERS[at]} · ` : "");
    const wanted = new Map<string, Field>(heads.map((field, at) => [letter(at) + field.title, field]));
    const pair = this.pair(heads);
    if (state.difference && pair) wanted.set(pair.title, pair);
    this.differing.update(heads);
    for (const pane of this.panes) if (!wanted.has(pane.name)) pane.panel.destroy();
    const kept = new Map(this.panes.map((pane) => [pane.name, pane]));
    this.panes = [...wanted].map(([name, field]) => kept.get(name) ?? this.pane(name, field));
    this.body.dataset.count = String(this.panes.length);
    replace(this.body, ...this.panes.map(({ element }) => element));
    replace(this.hint, state.against === undefined && !state.pins.length ? this.hintWords() : undefined);
    this.hint.hidden = !this.hint.childNodes.length;
    const focused = [...this.bar.querySelectorAll("button, select")].indexOf(document.activeElement as Element);
    replace(
      this.bar,
      ...heatControls(this.context, () => this.panes.map(({ panel }) => panel), false),
      this.differenceControl(pair !== undefined),
    );
    if (focused >= 0) (this.bar.querySelectorAll("button, select")[focused] as HTMLElement | undefined)?.focus();
  }

  /** The chosen head in both atlases where two are compared, else the pinned ones, else the chosen one alone. */
  private heads(): HeadField[] {
    const { map, head, pins } = this.context.state();
    const other = this.context.beside();
    if (!other) return (pins.length ? pins : [[map, head] as Pin]).map((pin) => new HeadField(this.context, ...pin));
    const same = sameHead(this.context.meta, [map, head], other.meta);
    return [new HeadField(this.context, map, head), new HeadField(other, ...same)];
  }

  private pair([first, second]: HeadField[]): Field | undefined {
    if (!first || !second || !sameShape(first.map, second.map)) return undefined;
    return new DifferenceField(this.context, first, second);
  }

  private differenceControl(possible: boolean): HTMLElement {
    const { difference } = this.context.state();
    const why = possible ? "the first minus the second (d)" : "needs two heads of the same shape";
    const control = toggle(
      "A − B",
      difference && possible,
      () => this.context.update({ difference: !difference }),
      why,
    );
    control.disabled = !possible;
    return control;
  }

  private pane(name: string, field: Field): Pane {
    const panel = new Panel(field.heads[0].context, field, false);
    const level = make("span", { class: "muted" });
    panel.onsaid = (words) => {
      level.textContent = words;
    };
    const pin: Pin = [field.mapIndex, field.heads[0].head];
    const remove = () => {
      const { pins, against } = this.context.state();
      if (field.signed) this.context.update({ difference: false });
      else if (against === undefined && !pins.length) this.context.update({ view: "head" });
      else this.context.update(against === undefined ? { pins: pinned(pins, pin) } : { against: undefined });
    };
    const close = button("×", remove, { class: "square quiet", set: { "aria-label": `remove ${field.title}` } });
    const element = make(
      "section",
      { class: "pane", set: { "aria-label": name } },
      make("header", {}, make("h2", { set: { title: name } }, name), level, close),
      panel.element,
    );
    return { name, panel, element };
  }

  private hintWords(): string {
    return (
      "No head is pinned: this is the head that was open. Open a head and press p, or ◇ Pin; " +
      "up to six heads stand here side by side and move together."
    );
  }
}
