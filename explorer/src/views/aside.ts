/** The side panel of a head: roles with evidence, metrics, and the largest weights of the chosen query. */

import { roleWords } from "../badges.ts";
import { type Context, keptOf } from "../context.ts";
import { button, make, replace } from "../dom.ts";
import type { HeadField } from "../field.ts";
import { type Kept, pair } from "../kept.ts";
import type { Need } from "../loader.ts";
import { rolesOf } from "../ordering.ts";
import { finestCell } from "../notices.ts";
import { weightWords } from "../hover.ts";
import { metricTitle } from "../meanings.ts";
import { attentionWords, figure, plain, visible, whole } from "../text.ts";
import { findsTop, topKeys } from "../top_keys.ts";
import { EXACT, TILE } from "../types.ts";

const GREATEST = 8;

/** The row of a longer map is not fetched as a whole. */
const MOST_KEYS = 4096;

/** A row's weights, and its columns with the greatest weight first. */
interface Ranked {
  name: string;
  weights: Float32Array;
  order: number[];
}

export class Aside {
  readonly element = make("aside", { set: { "aria-label": "about this head" } });
  private readonly known = make("div");
  private readonly chosen = make("section", { class: "chosen", set: { "aria-live": "polite" } });
  private built = "";
  private listed = "";
  private ranked?: Ranked;

  constructor(private readonly context: Context) {
    this.element.append(this.known, this.chosen);
  }

  update(field: HeadField): void {
    this.describe(field);
    this.context.loader.frame(this, (need) => this.greatest(need, field));
  }

  destroy(): void {
    this.context.loader.release(this);
  }

  private describe(field: HeadField): void {
    if (this.built === field.title) return;
    this.built = field.title;
    const { map } = field;
    const averaged = this.context.means.of(field.mapIndex, field.head);
    const roles = rolesOf(map, field.head);
    const metrics = Object.entries(map.metrics).map(([name, heads]) =>
      make("div", { set: { title: metricTitle(name) } }, make("dt", {}, name.replace(/_/g, " ")), make("dd", {}, figure(heads[field.head]))),
    );
    replace(
      this.known,
      make("h2", {}, field.title),
      make(
        "p",
        { class: "muted" },
        `${plain(map.name, 120)}, ${attentionWords(map)}, ${whole(map.queries)} × ${whole(map.keys)}`,
      ),
      !field.offers(EXACT) && make("p", { class: "muted" }, this.heldWords(field)),
      roles.length > 0 && make("h3", {}, "Roles"),
      ...roles.map((role) =>
        make(
          "div",
          { class: "role-card", set: { title: roleWords(role) } },
          make(
            "div",
            {},
            make("strong", {}, plain(role.name)),
            make("span", { class: "muted" }, `  score ${figure(role.score)} · n = ${whole(role.n)}`),
          ),
          make("p", { class: "muted" }, plain(String(role.rule), 300)),
        ),
      ),
      !averaged && metrics.length > 0 && make("h3", {}, this.context.state().words ? "Metrics, of tokens" : "Metrics"),
      !averaged && make("dl", {}, ...metrics),
    );
  }

  private heldWords(field: HeadField): string {
    const cell = finestCell(field.map, (level) => field.offers(level)) ?? "many";
    return `Of this head the page has cells of ${cell} weights and more, and no single weights${this.context.meta.around ? " but around what it opens with" : ""}.`;
  }

  private greatest(need: Need, field: HeadField): void {
    const at = keptOf(this.context, field.mapIndex);
    const { map } = field;
    if (!field.offers(EXACT)) {
      this.list("not here", make("p", { class: "muted" }, "Click a cell or a token to keep it."));
      return;
    }
    const row = at.query.at(-1);
    if (row === undefined) {
      this.list(
        "none",
        make("p", { class: "muted" }, "Click a cell or a query to keep it and to see where it looks."),
      );
      return;
    }
    const token = (side: "query" | "key", index: number) => {
      const found = this.context.tokens.at(need, field.mapIndex, side, index);
      return found === undefined ? "…" : visible(found, 24);
    };
    const title = make("h3", {}, `Query ${whole(row)}  ${token("query", row)}`);
    if (map.keys > MOST_KEYS && findsTop(this.context, field)) {
      this.greatestOfLong(need, field, at, row, title);
      return;
    }
    if (map.keys > MOST_KEYS) {
      this.list(
        `long ${title.textContent}`,
        title,
        make("p", { class: "muted" }, `The greatest weights of a row are listed for up to ${whole(MOST_KEYS)} keys.`),
      );
      return;
    }
    const ranked = this.rank(need, field, row);
    if (!ranked) {
      this.list(`waiting ${title.textContent}`, title, make("p", { class: "muted" }, "…"));
      return;
    }
    const words = (column: number) => `${whole(column)}  ${token("key", column)}`;
    const shown = ranked.order.slice(0, GREATEST);
    const name = `${field.title} ${at.query},${at.key} ${title.textContent} ${shown.map(words).join()}`;
    if (name === this.listed) return;
    if (ranked.weights.some((weight) => weight === Infinity)) {
      this.list(name, title, make("p", { class: "muted" }, weightWords(Infinity)));
      return;
    }
    const all = ranked.order.reduce((sum, column) => sum + ranked.weights[column], 0);
    const share = shown.reduce((sum, column) => sum + ranked.weights[column], 0) / (this.context.meta.quantity ? all : 1);
    const items = shown.map((column) => this.item(at, row, column, words(column), ranked.weights[column], ranked.weights[ranked.order[0]]));
    const told = `Together ${(100 * share).toFixed(1)} % of ${this.context.meta.quantity ? "all contributions to this query" : "what this query gives"}.`;
    this.list(name, title, make("ol", {}, ...items), make("p", { class: "muted" }, told));
  }

  /** The greatest weights of a long row, which the source finds. */
  private greatestOfLong(need: Need, field: HeadField, at: Kept, row: number, title: HTMLElement): void {
    const found = topKeys(need, this.context, field, "query", row);
    if (!found) {
      this.list(`waiting ${title.textContent}`, title, make("p", { class: "muted" }, "…"));
      return;
    }
    const words = found.keys.map(({ index, token }) => `${whole(index)}  ${visible(token, 24)}`);
    const name = `${field.title} ${at.query},${at.key} ${title.textContent} ${words.join()}`;
    if (found.broken) return this.list(name, title, make("p", { class: "muted" }, weightWords(Infinity)));
    const items = found.keys.map(({ index, value }, place) => this.item(at, row, index, words[place], value, found.keys[0].value));
    const told = found.share === undefined ? "" : `Together ${(100 * found.share).toFixed(1)} % of what this query gives.`;
    this.list(name, title, make("ol", {}, ...items), make("p", { class: "muted" }, told));
  }

  /** A key with its weight as a bar and as a number; a press chooses it. */
  private item(
    kept: Kept,
    row: number,
    column: number,
    words: string,
    value: number,
    most: number,
  ): HTMLElement {
    const bar = make("span", { class: "bar-fill", set: { "aria-hidden": "true" } });
    bar.style.width = `${(100 * value) / most}%`;
    const press = button("", () => this.context.update({ at: pair(row, column) }), {
      class: "key-row",
      set: { "aria-current": kept.key.includes(column) ? "true" : undefined },
    });
    const weight = make("span", { class: "key-weight" }, figure(value));
    press.append(bar, make("span", { class: "key-token" }, words), weight);
    return make("li", {}, press);
  }

  /** Shows other elements only where they say something else, since this is called with every frame. */
  private list(name: string, ...children: Node[]): void {
    if (name === this.listed) return;
    this.listed = name;
    replace(this.chosen, ...children);
  }

  private rank(need: Need, field: HeadField, row: number): Ranked | undefined {
    const name = `${field.mapIndex}/${field.head}/${row}`;
    if (this.ranked?.name === name) return this.ranked;
    const weights = this.row(need, field, row);
    if (!weights) return undefined;
    const order = [...weights.keys()].filter((column) => weights[column] > 0).sort((a, b) => weights[b] - weights[a]);
    this.ranked = { name, weights, order };
    return this.ranked;
  }

  /** All weights of a row, in pieces of 256. */
  private row(need: Need, field: HeadField, row: number): Float32Array | undefined {
    const result = new Float32Array(field.map.keys);
    let complete = true;
    for (let column0 = 0; column0 < result.length; column0 += TILE) {
      const region = { row0: row, row1: row + 1, column0, column1: Math.min(column0 + TILE, result.length) };
      const piece = need(`row ${field.mapIndex}/${field.head}/${row}/${column0}`, (signal) =>
        this.context.source.weights(field.mapIndex, field.head, region, signal),
      );
      if (piece) result.set(piece, column0);
      else complete = false;
    }
    return complete ? result : undefined;
  }
}
