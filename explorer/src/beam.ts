/** The bar that chooses one of the n best translations, and shows how it differs from the best. */

import type { Context } from "./context.ts";
import { button, make, replace } from "./dom.ts";
import { differences, hypothesesOf, neighbour, type Part } from "./hypotheses.ts";
import { ofHypothesis } from "./state.ts";
import { figure, plain } from "./text.ts";
import type { Hypothesis } from "./types.ts";

const LONGEST = 1000;

export class Beam {
  readonly element = make("section", { class: "beam", set: { "aria-label": "translations of the beam" } });
  private built = "";

  constructor(private readonly context: Context) {}

  update(): void {
    const { hypothesis, listed } = this.context.state();
    const all = hypothesesOf(this.context.meta);
    const made = JSON.stringify([hypothesis, listed, all]);
    if (made === this.built) return;
    this.built = made;
    this.element.hidden = all.length < 2;
    const controls = () => [...this.element.querySelectorAll("button")];
    const focused = controls().indexOf(document.activeElement as HTMLButtonElement);
    replace(this.element, ...(all.length < 2 ? [] : this.content(all, hypothesis, listed)));
    if (focused >= 0) controls()[Math.min(focused, controls().length - 1)].focus();
  }

  private content(all: Hypothesis[], rank: number, listed: boolean): Node[] {
    const now = all.find((hypothesis) => hypothesis.rank === rank) ?? all[0];
    const step = (by: 1 | -1) => () => this.choose(neighbour(this.context.meta, rank, by));
    const bar = make(
      "div",
      { class: "beam-bar" },
      make(
        "span",
        { class: "group" },
        button("‹", step(-1), { class: "square", set: { "aria-label": "translation before", title: "before ([)" } }),
        button("›", step(1), { class: "square", set: { "aria-label": "translation behind", title: "next (])" } }),
      ),
      make("strong", {}, `${all.indexOf(now) + 1} of ${all.length}`),
      make("span", { class: "muted" }, `score ${figure(now.score)}`),
      make("span", { class: "beam-text", set: { "aria-live": "polite" } }, ...this.text(all[0], now)),
      button(listed ? "Hide list" : `All ${all.length}`, () => this.context.update({ listed: !listed }), {
        set: { "aria-expanded": String(listed) },
      }),
    );
    return listed ? [bar, this.list(all, now)] : [bar];
  }

  private list(all: Hypothesis[], now: Hypothesis): HTMLElement {
    const items = all.map((one) => {
      const press = button("", () => this.choose(one.rank), {
        class: "beam-row",
        set: { "aria-current": one === now ? "true" : undefined },
      });
      press.append(
        make("span", { class: "muted" }, String(one.rank + 1)),
        make("span", { class: "muted" }, figure(one.score)),
        make("span", { class: "beam-text" }, ...this.text(all[0], one)),
      );
      return make("li", {}, press);
    });
    return make("ol", { class: "beam-list" }, ...items);
  }

  /** The words of a translation; those that the best does not have are underlined, those that it has beside are struck. */
  private text(best: Hypothesis, one: Hypothesis): Node[] {
    const said = (words: string) => plain(words, LONGEST);
    const parts: Part[] =
      one === best ? [{ words: one.text, kind: "same" }] : differences(best.text, one.text);
    return parts.flatMap(({ words, kind }): Node[] => [
      kind === "same"
        ? document.createTextNode(said(words))
        : make(kind === "new" ? "ins" : "del", {}, said(words)),
      document.createTextNode(" "),
    ]);
  }

  private choose(rank: number): void {
    this.context.update(ofHypothesis(this.context.state(), this.context.meta, rank));
  }
}
