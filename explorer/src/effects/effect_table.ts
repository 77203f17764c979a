/** All heads by their effects, the greatest first, while they are measured one after the other. */

import type { Context } from "../context.ts";
import { button, make } from "../dom.ts";
import { mapsOf } from "../hypotheses.ts";
import { figure, plain, visible, whole } from "../text.ts";
import { type Measured, ranked } from "./effect_store.ts";
import type { Effect, ModelKind, Outcome } from "./effect_types.ts";
import { EFFECT_MEANINGS, signed } from "./effect_words.ts";

/** So many rows are shown at first, and while others come. */
const FIRST = 12;

export class EffectTable {
  private whole = false;

  constructor(private readonly context: Context) {}

  of(one: Measured, kind: ModelKind): HTMLElement[] {
    const all = ranked(one.effects);
    if (!all.length) return [];
    const shown = all.slice(0, this.whole && one.state === "done" ? all.length : FIRST);
    const extra = kind === "encoder" ? "of its length" : kind === "translator" ? "what it says then" : "next token then";
    const names = ["rank", "effect", "head", extra];
    const lines = shown.map((effect, at) => this.line(effect, at, all, kind, one.before?.before));
    const table = make(
      "table",
      { set: { "aria-label": "heads by effect" } },
      make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { set: { scope: "col" } }, name)))),
      make("tbody", {}, ...lines),
    );
    const about = make("p", { class: "muted" }, `Effect on ${one.compared}: ${EFFECT_MEANINGS[kind]}.`);
    const scroll = make("div", { class: "table-scroll", set: { tabindex: 0, role: "region", "aria-label": "heads by effect, scrolled" } }, table);
    const rest = all.length - shown.length;
    if (one.state !== "done" || !rest) return [about, scroll];
    const more = button(`Show ${whole(rest)} more`, () => {
      this.whole = true;
      const article = scroll.parentElement;
      const [, now] = this.of(one, kind);
      article?.replaceChild(now, scroll);
      more.remove();
      now.focus();
    });
    return [about, scroll, more];
  }

  private line(effect: Effect, at: number, all: Effect[], kind: ModelKind, before: Outcome | undefined): HTMLElement {
    const same = all.findIndex(({ value }) => Math.abs(value ?? 0) === Math.abs(effect.value ?? 0));
    return make(
      "tr",
      {},
      make("td", { class: "figure" }, whole(Math.min(same, at) + 1)),
      make("td", { class: "figure" }, signed(effect.value, kind)),
      make("th", { set: { scope: "row" } }, this.head(effect)),
      make("td", { class: kind === "encoder" ? "figure" : "said" }, ...outcome(effect, kind, before)),
    );
  }

  /** Opens the head, where it has a map. */
  private head({ module, head }: Effect): Node {
    const { meta, names } = this.context;
    const { hypothesis } = this.context.state();
    const map = mapsOf(meta, hypothesis).find((at) => meta.maps[at].name === module);
    if (map === undefined || head === null) return document.createTextNode(`${plain(module ?? "", 60)} · head ${head ?? ""}`);
    const words = `${names[map]} · head ${head}`;
    return button(words, () => this.context.update({ view: "head", map, head, mean: "", frame: undefined }), { class: "link" });
  }
}

/** In words; texts of any script have their own direction. */
function outcome({ distance, after }: Effect, kind: ModelKind, before: Outcome | undefined): (Node | string)[] {
  if (kind === "encoder") return [figure(distance)];
  if (kind === "translator") return after.changed ? [make("bdi", {}, plain(after.text ?? "", 120))] : ["the same"];
  const next = after.next?.[0];
  if (!next) return [];
  const same = next[0] === before?.next?.[0]?.[0];
  return [same ? "the same" : make("bdi", {}, `“${visible(next[0])}”`), `, ${figure(next[1])}`];
}
