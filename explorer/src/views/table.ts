/** The table of all heads' metrics and roles, sortable and saved as CSV. */

import { roleWords } from "../badges.ts";
import type { Context, ViewPart } from "../context.ts";
import { button, make, replace } from "../dom.ts";
import { csvOf } from "../exports.ts";
import { isNothing, keptText } from "../kept.ts";
import { keptMeaning, KeptValues, type Ranking } from "../kept_values.ts";
import { metricTitle } from "../meanings.ts";
import { type Head, heads, KEPT_WEIGHT, metricNames, rolesOf, valueOf } from "../ordering.ts";
import { figure, plain, whole } from "../text.ts";
import { filters } from "./filters.ts";

const PAGE = 500;

export class TableView implements ViewPart {
  readonly element = make("div", { class: "table-view" });
  private readonly body = make("div", {
    class: "table-scroll",
    set: { tabindex: 0, role: "region", "aria-label": "metrics of heads" },
  });
  private readonly kept: KeptValues;
  /** The values of all heads by what is kept, once they are known. */
  private ranking?: Ranking;
  private shown = PAGE;
  private built = "";

  constructor(private readonly context: Context) {
    this.kept = new KeptValues(context);
    this.element.append(make("div", { class: "bar" }, ...filters(context)), this.body);
  }

  update(): void {
    const state = this.context.state();
    this.ranking = this.context.loader.frame(this, (need) => this.kept.look(need));
    const made = JSON.stringify([keptText(state.at), this.ranking !== undefined, state.order, state.role, state.metric, state.find, state.hypothesis, this.shown, state.map, state.head]);
    if (made === this.built) return;
    this.built = made;
    this.build();
  }

  redraw(): void {
    this.update();
  }

  async csv(): Promise<string> {
    const metrics = metricNames(this.context.meta);
    const rows = this.found().map((at) => {
      const map = this.context.meta.maps[at.map];
      const values = metrics.map((name) => valueOf(map, at.head, name));
      const roles = rolesOf(map, at.head).map((role) => `${role.name} ${figure(role.score)} (n = ${role.n})`);
      const kept = this.ranking ? [this.ranking.value(at)] : [];
      return [plain(map.name, 200), map.call, map.sequence, map.kind, at.head, ...kept, ...values, roles.join("; ")];
    });
    const kept = this.ranking ? [keptMeaning(this.context.state().at)] : [];
    return csvOf([["map", "call", "sequence", "kind", "head", ...kept, ...metrics, "roles"], ...rows]);
  }

  destroy(): void {
    this.context.loader.release(this);
  }

  private found(): Head[] {
    const value = (head: Head) => this.ranking?.value(head) ?? NaN;
    return heads(this.context.meta, this.context.names, this.context.state(), value);
  }

  private build(): void {
    const metrics = metricNames(this.context.meta);
    const found = this.found();
    const { at } = this.context.state();
    const table = make(
      "table",
      {},
      make("caption", {}, `${plain(this.context.meta.title || "Attention", 120)}: ${whole(found.length)} heads`),
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          this.header("layer", "layer"),
          make("th", { set: { scope: "col" } }, "head"),
          make("th", { set: { scope: "col" } }, "kind"),
          !isNothing(at) && this.header("kept", KEPT_WEIGHT, keptMeaning(at)),
          ...metrics.map((name) => this.header(name, name, metricTitle(name))),
          make("th", { set: { scope: "col" } }, "roles"),
        ),
      ),
      make("tbody", {}, ...found.slice(0, this.shown).map((at) => this.row(at, metrics))),
    );
    const more =
      found.length > this.shown &&
      button(`Show ${whole(Math.min(PAGE, found.length - this.shown))} more`, () => {
        this.shown += PAGE;
        this.update();
      });
    replace(this.body, table, more);
  }

  private header(name: string, order: string, title?: string): HTMLElement {
    const { order: now } = this.context.state();
    const falling = now === `-${order}`;
    const rising = now === order;
    const next = order === "layer" ? "layer" : falling ? order : `-${order}`;
    const arrow = order === "layer" ? "" : falling ? " ↓" : rising ? " ↑" : "";
    const sort = falling ? "descending" : rising ? "ascending" : "none";
    const press = button(name + arrow, () => this.context.update({ order: next }), { set: { title } });
    return make("th", { set: { scope: "col", "aria-sort": sort } }, press);
  }

  private row(at: Head, metrics: string[]): HTMLElement {
    const map = this.context.meta.maps[at.map];
    const { map: nowMap, head: nowHead, at: kept } = this.context.state();
    const roles = rolesOf(map, at.head);
    const open = button(
      String(at.head),
      () => this.context.update({ view: "head", ...at, mean: "", frame: undefined }),
      {
        class: "link",
        set: { "aria-label": `open head ${at.head} of ${this.context.names[at.map]}` },
      },
    );
    return make(
      "tr",
      { class: at.map === nowMap && at.head === nowHead ? "current" : "" },
      make("th", { set: { scope: "row", title: plain(map.name, 200) } }, this.context.names[at.map]),
      make("td", {}, open),
      make("td", {}, map.kind),
      !isNothing(kept) && make("td", { class: "figure" }, this.ranking ? this.ranking.words(at) || "–" : "…"),
      ...metrics.map((name) => make("td", { class: "figure" }, figure(valueOf(map, at.head, name)))),
      make("td", { class: "roles" }, ...roles.map((role) => make("span", { class: "role" }, roleWords(role)))),
    );
  }
}
