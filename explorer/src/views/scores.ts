/** Precision, recall and AER of a head's links against gold links, with a key to their signs. */

import { button, make, replace } from "../dom.ts";
import type { Context } from "../context.ts";
import type { HeadField } from "../field.ts";
import { SIGNS } from "../mark_shapes.ts";
import { isShort, type Matched, MOST_LINKED } from "../matching.ts";

export class ScoreLine {
  readonly element = make("p", { class: "scores", set: { role: "status", hidden: true } });
  private built = "";

  /** `lines`: gold links are drawn as lines, and not as boxes. */
  constructor(
    private readonly context: Context,
    private readonly lines = false,
  ) {}

  show(field: HeadField, found: Matched | undefined): void {
    const words = this.words(field, found);
    const { gold } = this.context.state();
    const name = `${words} ${gold} ${this.context.state().alignment}`;
    if (name === this.built) return;
    this.built = name;
    this.element.hidden = words === "";
    const kinds = new Set(found?.marks.map(({ sign }) => sign));
    const drawn = (["link", "right", "wrong", "outside"] as const).filter((sign) => kinds.has(sign));
    const boxes = this.lines ? ["━ sure", "┅ possible"] : ["▢ sure", "⬚ possible"];
    const signs = [...drawn.map((sign) => SIGNS[sign]), ...(field.map.gold && gold ? boxes : [])].join("   ");
    const toggle =
      field.map.gold &&
      button(gold ? "Hide gold" : "Show gold", () => this.context.update({ gold: !this.context.state().gold }), {
        class: "link",
        set: { title: "links that people made (o)" },
      });
    replace(this.element, make("span", {}, words), make("span", { class: "signs" }, signs), toggle || undefined);
  }

  private words({ map }: HeadField, found: Matched | undefined): string {
    const { alignment, least } = this.context.state();
    const count = map.gold && `${map.gold.sure.length} sure and ${map.gold.possible.length} possible gold links`;
    if (!alignment) return count ? `${count}: choose an alignment (a) to hold against them.` : "";
    if (!isShort(map)) {
      return alignment === "argmax"
        ? ""
        : `${alignment} needs all weights of a map of at most ${MOST_LINKED} × ${MOST_LINKED}; the greatest weight of each row in sight is marked.`;
    }
    if (!found) return "";
    const method = alignment === "threshold" ? `weights ≥ ${least}` : alignment;
    if (!found.scores) return "";
    const { precision, recall, errorRate, links, inPossible, inSure, sure } = found.scores;
    const part = (name: string, value: number, of: number, whole: number) =>
      Number.isNaN(value) ? `no ${name}` : `${name} ${percent(value)} (${of} of ${whole})`;
    const rate = Number.isNaN(errorRate) ? "no AER" : `AER ${percent(errorRate)}`;
    return (
      `${method} between words: ${rate}, ${part("precision", precision, inPossible, links)}, ` +
      part("recall", recall, inSure, sure)
    );
  }
}

const percent = (value: number): string => `${(100 * value).toFixed(1)} %`;
