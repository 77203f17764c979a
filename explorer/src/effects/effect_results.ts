/** What changed with heads switched off, the newest run first; of all heads a table that grows. */

import type { Context } from "../context.ts";
import { button, make, replace } from "../dom.ts";
import { KEPT_ORDERS } from "../ordering.ts";
import { whole } from "../text.ts";
import type { EffectStore, Measured } from "./effect_store.ts";
import { EffectTable } from "./effect_table.ts";
import type { ModelKind } from "./effect_types.ts";
import { alignmentWords, effectSentence, outcomeTable } from "./effect_words.ts";

export class EffectResults {
  readonly element = make("div", {
    class: "effect-results",
    set: { tabindex: 0, role: "region", "aria-label": "what changed", hidden: true },
  });
  private readonly table: EffectTable;
  private readonly articles = new Map<Measured, HTMLElement>();

  constructor(
    private readonly context: Context,
    private readonly store: EffectStore,
  ) {
    this.table = new EffectTable(context);
  }

  update(kind: ModelKind): void {
    const { results } = this.store;
    for (const one of this.articles.keys()) if (!results.includes(one)) this.articles.delete(one);
    const all = results.map((one) => this.article(one, kind));
    this.element.hidden = !all.length;
    const { children } = this.element;
    if (children.length !== all.length || all.some((one, at) => children[at] !== one)) replace(this.element, ...all);
  }

  /** Filled anew as far as the run is. */
  private article(one: Measured, kind: ModelKind): HTMLElement {
    const article = this.articles.get(one) ?? make("article", { class: "effect" });
    this.articles.set(one, article);
    const state = `${one.state} ${one.effects.length}`;
    if (article.dataset.state !== state) this.fill(article, one, kind);
    article.dataset.state = state;
    return article;
  }

  private fill(article: HTMLElement, one: Measured, kind: ModelKind): void {
    const { request, before, effects, state } = one;
    const focused = article.contains(document.activeElement) ? document.activeElement?.textContent : undefined;
    const alignment = before?.alignment && make("p", { class: "muted" }, alignmentWords(before.alignment));
    const body = request.terms === null ? this.table.of(one, kind) : single(one, kind);
    const heading = make("h2", { set: { tabindex: -1 } }, one.title);
    replace(article, heading, ...stateWords(one), alignment || undefined, ...body);
    if (request.terms === null && state === "done") {
      const order = () => this.context.update({ view: "grid", order: `-${KEPT_ORDERS.effect}` });
      const sum = `All ${whole(effects.length)} heads are measured.`;
      article.insertBefore(make("p", {}, sum, " ", button("Order heads by effect", order)), article.children[1] ?? null);
    }
    if (focused === undefined) return;
    const same = [...article.querySelectorAll("button")].find(({ textContent }) => textContent === focused);
    (same ?? heading).focus();
  }
}

/** How far a run is. */
function stateWords({ state, error, before, effects }: Measured): (HTMLElement | undefined)[] {
  if (state === "running") {
    const of = before?.of ?? 1;
    const bar = make("progress", { set: { max: of, value: effects.length, "aria-label": "heads measured" } });
    return [make("p", { class: "muted" }, bar, ` ${whole(effects.length)} of ${whole(of)}`)];
  }
  if (state === "cancelled") return [make("p", { class: "muted", set: { role: "status" } }, `Cancelled after ${whole(effects.length)}.`)];
  if (state === "failed") return [make("p", { class: "failed", set: { role: "alert" } }, error ?? "it failed")];
  return [];
}

function single({ before, effects, compared }: Measured, kind: ModelKind): HTMLElement[] {
  const [effect] = effects;
  if (!before || !effect) return [];
  const sentence = make("p", { class: "moved", set: { role: "status" } }, effectSentence(kind, compared, before.before, effect));
  return [sentence, outcomeTable(kind, before.before, effect.after)].filter((part) => part !== undefined);
}
