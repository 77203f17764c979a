/** The view of one head: heat map, controls and side panel. */

import { type Context, shownHead, type ViewPart } from "../context.ts";
import { make, replace } from "../dom.ts";
import { HeadField } from "../field.ts";
import { Panel } from "../panel.ts";
import { levelCsv, regionCsv, regionNpz } from "../region.ts";
import type { Picture } from "../shapes.ts";
import { EXACT, type Region } from "../types.ts";
import { visible } from "../viewport.ts";
import { Aside } from "./aside.ts";
import { heatControls } from "./controls.ts";
import { headControls } from "./heads_shown.ts";
import { ScoreLine } from "./scores.ts";

export class HeadView implements ViewPart {
  readonly element = make("div", { class: "head-view" });
  readonly panel: Panel;
  private readonly aside: Aside;
  private readonly scores: ScoreLine;
  private readonly bar = make("div", { class: "bar" });
  private readonly level = make("span", { class: "level", set: { role: "status" } });
  private field: HeadField;
  private built = "";

  constructor(private readonly context: Context) {
    this.field = new HeadField(context, context.state().map, shownHead(context));
    this.panel = new Panel(context, this.field, true);
    this.panel.onsaid = (words) => {
      this.level.textContent = words;
    };
    this.panel.onmatched = (found) => this.scores.show(this.field, found);
    this.scores = new ScoreLine(context);
    this.aside = new Aside(context);
    this.element.append(this.bar, this.scores.element, make("div", { class: "head-body" }, this.panel.element, this.aside.element));
  }

  update(): void {
    const state = this.context.state();
    const head = shownHead(this.context);
    if (state.map !== this.field.mapIndex || head !== this.field.head) {
      this.field = new HeadField(this.context, state.map, head);
      this.panel.show(this.field);
    }
    const made = JSON.stringify([
      state.map,
      state.head,
      state.scale,
      state.reduce,
      state.normalise,
      state.clip,
      state.sight,
      state.alignment,
      state.words,
      state.pins,
      state.mean,
      state.rows,
    ]);
    if (made !== this.built) {
      this.built = made;
      const focused = [...this.bar.querySelectorAll("button, select")].indexOf(document.activeElement as Element);
      const controls = heatControls(this.context, () => [this.panel], true);
      replace(this.bar, ...headControls(this.context), ...controls, this.level);
      if (focused >= 0) (this.bar.querySelectorAll("button, select")[focused] as HTMLElement | undefined)?.focus();
    }
    this.redraw();
  }

  redraw(): void {
    this.aside.update(this.field);
    this.panel.draw();
  }

  reveal(): void {
    this.panel.reveal();
  }

  picture(): Picture {
    return this.panel.picture();
  }

  async csv(): Promise<string> {
    const { level } = this.panel.choice;
    if (level === EXACT) return regionCsv(this.context, this.field, this.region());
    return levelCsv(this.context, this.field, this.region(), level, this.context.state().reduce);
  }

  async npz(): Promise<Uint8Array<ArrayBuffer>> {
    return regionNpz(this.context, this.field, this.region());
  }

  private region(): Region {
    return visible(this.panel.viewport(), this.panel.extent(), this.panel.inner());
  }

  destroy(): void {
    this.panel.destroy();
    this.aside.destroy();
  }
}
