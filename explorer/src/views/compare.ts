/** Up to four heads side by side, moved together; and the difference of the first two. */

import type { Context, ViewPart } from "../context.ts";
import { button, make, replace, toggle } from "../dom.ts";
import { DifferenceField, type Field, HeadField, sameShape } from "../field.ts";
import { Panel } from "../panel.ts";
import type { Picture, Shape } from "../shapes.ts";
import { pinned, type Pin } from "../state.ts";
import { heatControls } from "./controls.ts";

interface Pane {
  name: string;
  panel: Panel;
  element: HTMLElement;
}

export class CompareView implements ViewPart {
  readonly element = make("div", { class: "compare-view" });
  private readonly bar = make("div", { class: "bar" });
  private readonly body = make("div", { class: "panes" });
  private panes: Pane[] = [];
  private built = "";

  constructor(private readonly context: Context) {
    this.element.append(this.bar, this.body);
  }

  get panel(): Panel | undefined {
    return this.panes[0]?.panel;
  }

  update(): void {
    const state = this.context.state();
    const made = JSON.stringify([
      state.pins,
      state.difference,
      state.scale,
      state.reduce,
      state.normalise,
      state.clip,
      state.alignment,
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

  picture(): Picture {
    const origin = this.body.getBoundingClientRect();
    const shapes: Shape[] = this.panes.flatMap(({ panel, element }): Shape[] => {
      const box = panel.element.getBoundingClientRect();
      const [x, y] = [box.left - origin.left, box.top - origin.top];
      const title = element.querySelector("h2")?.textContent ?? "";
      return [
        { kind: "text", x: x + 8, y: y - 12, text: title, colour: this.context.palette().ink, bold: true },
        { kind: "group", x, y, shapes: panel.picture().shapes },
      ];
    });
    return { title: "heads compared", width: origin.width, height: origin.height, shapes };
  }

  destroy(): void {
    for (const { panel } of this.panes) panel.destroy();
  }

  /** The panels that are wanted; those that are there already are kept with all they have drawn. */
  private build(): void {
    const state = this.context.state();
    const wanted = new Map<string, () => Field>();
    for (const [map, head] of state.pins) wanted.set(`${map}.${head}`, () => new HeadField(this.context, map, head));
    const pair = this.pair(state.pins);
    if (state.difference && pair) wanted.set(`${state.pins[0]}-${state.pins[1]}`, () => pair);
    for (const pane of this.panes) if (!wanted.has(pane.name)) pane.panel.destroy();
    const kept = new Map(this.panes.map((pane) => [pane.name, pane]));
    this.panes = [...wanted].map(([name, field]) => kept.get(name) ?? this.pane(name, field()));
    this.body.dataset.count = String(this.panes.length);
    replace(this.body, ...this.panes.map(({ element }) => element), this.panes.length === 0 && this.empty());
    const focused = [...this.bar.querySelectorAll("button, select")].indexOf(document.activeElement as Element);
    replace(
      this.bar,
      ...heatControls(this.context, () => this.panes.map(({ panel }) => panel), false),
      this.differenceControl(pair !== undefined),
    );
    if (focused >= 0) (this.bar.querySelectorAll("button, select")[focused] as HTMLElement | undefined)?.focus();
  }

  private pair(pins: Pin[]): Field | undefined {
    const maps = this.context.meta.maps;
    if (pins.length < 2 || !sameShape(maps[pins[0][0]], maps[pins[1][0]])) return undefined;
    const [first, second] = pins.map(([map, head]) => new HeadField(this.context, map, head));
    return new DifferenceField(this.context, first, second);
  }

  private differenceControl(possible: boolean): HTMLElement {
    const { difference } = this.context.state();
    const why = possible ? "the first pinned head minus the second" : "needs two pinned heads of the same shape";
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
    const panel = new Panel(this.context, field, false);
    const level = make("span", { class: "muted" });
    panel.onsaid = (words) => {
      level.textContent = words;
    };
    const pin: Pin = [field.mapIndex, (field.heads[0] as HeadField).head];
    const remove = () =>
      this.context.update(field.signed ? { difference: false } : { pins: pinned(this.context.state().pins, pin) });
    const close = button("×", remove, { class: "square quiet", set: { "aria-label": `remove ${field.title}` } });
    const element = make(
      "section",
      { class: "pane", set: { "aria-label": field.title } },
      make("header", {}, make("h2", {}, field.title), level, close),
      panel.element,
    );
    return { name, panel, element };
  }

  private empty(): HTMLElement {
    return make(
      "p",
      { class: "empty" },
      "No head is pinned. Open a head and press p, or ◇ Pin. " +
        "Up to four heads stand here side by side and move together.",
    );
  }
}
