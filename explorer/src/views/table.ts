/** The table of all heads' metrics and roles, sortable and saved as CSV. */

import { roleWords } from "../badges.ts";
import type { Context, ViewPart } from "../context.ts";
import { button, make, replace } from "../dom.ts";
import { csvOf } from "../exports.ts";
import { isNothing, keptText } from "../kept.ts";
import { keptOrders, KeptValues, orderMeaning, type Ranking } from "../kept_values.ts";
import { metricTitle } from "../meanings.ts";
import { type Head, heads, KEPT_ORDERS, type KeptOrder, keptOrder, metricNames, rolesOf, valueOf } from "../ordering.ts";
import { figure, plain, whole } from "../text.ts";
import { filters, showOrder } from "./filters.ts";

const PAGE = 500;
/** Columns by what is kept. */
const KEPT_NAMES: Readonly<Record<KeptOrder, string>> = {
  weight: "kept",
  contribution: "contribution",
  change: "change",
  effect: "effect",
};

export class TableView implements ViewPart {
  readonly element = make("div", { class: "table-view" });
  private readonly body = make("div", {
    class: "table-scroll",
    set: { tabindex: 0, role: "region", "aria-label": "metrics of heads" },
  });
  private readonly bar: HTMLElement;
  private readonly kept: ReadonlyMap<KeptOrder, KeptValues>;
  /** The values of all heads by what is kept, for each order that there is; undefined until they are known. */
  private rankings = new Map<KeptOrder, Ranking | undefined>();
  private shown = PAGE;
  private built = "";

  constructor(private readonly context: Context) {
    this.kept = new Map(keptOrders(context).map((by) => [by, new KeptValues(context)]));
    this.bar = make("div", { class: "bar" }, ...filters(context));
    this.element.append(this.bar, this.body);
  }

  update(): void {
    const state = this.context.state();
    showOrder(this.bar, state.order);
    this.rankings = this.context.loader.frame(this, (need) => {
      const found = [...this.kept].map(([by, values]) => [by, values.look(need, by)] as const);
      // Effects are there once they are measured, and all others where something is kept.
      return new Map(found.filter(([by, ranking]) => (by === "effect" ? ranking : !isNothing(state.at))));
    });
    const known = [...this.rankings].map(([by, ranking]) => [by, ranking?.count, this.meaning(by)]);
    const made = JSON.stringify([keptText(state.at), known, state.order, state.role, state.metric, state.find, state.hypothesis, this.shown, state.map, state.head]);
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
      const kept = [...this.rankings.values()].map((ranking) => ranking?.value(at) ?? NaN);
      return [plain(map.name, 200), map.call, map.sequence, map.kind, at.head, ...kept, ...values, roles.join("; ")];
    });
    const kept = [...this.rankings.keys()].map((by) => this.meaning(by));
    return csvOf([["map", "call", "sequence", "kind", "head", ...kept, ...metrics, "roles"], ...rows]);
  }

  destroy(): void {
    this.context.loader.release(this);
  }

  private found(): Head[] {
    const state = this.context.state();
    const by = keptOrder(state.order);
    const ranking = by && this.rankings.get(by);
    return heads(this.context.meta, this.context.names, state, (head) => ranking?.size(head) ?? NaN);
  }

  private meaning(by: KeptOrder): string {
    return orderMeaning(this.context, by);
  }

  private build(): void {
    const metrics = metricNames(this.context.meta);
    const found = this.found();
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
          ...[...this.rankings.keys()].map((by) => this.header(KEPT_NAMES[by], KEPT_ORDERS[by], this.meaning(by))),
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
    const { map: nowMap, head: nowHead } = this.context.state();
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
      ...[...this.rankings.values()].map((ranking) => make("td", { class: "figure" }, ranking ? ranking.words(at) || "–" : "…")),
      ...metrics.map((name) => make("td", { class: "figure" }, figure(valueOf(map, at.head, name)))),
      make("td", { class: "roles" }, ...roles.map((role) => make("span", { class: "role" }, roleWords(role)))),
    );
  }
}
