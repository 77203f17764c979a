/** The greatest keys of the kept query, wherever they are in the text, beside the lines of a window. */

import { type Context, keptOf } from "../context.ts";
import { button, make, replace } from "../dom.ts";
import type { HeadField } from "../field.ts";
import type { Need } from "../loader.ts";
import { weightWords } from "../hover.ts";
import { LINE_HEIGHT, type Place, TOP } from "../line_shapes.ts";
import type { Shape } from "../shapes.ts";
import { figure, visible, whole } from "../text.ts";
import { findsTop, type TopKey, type TopKeys, topKeys } from "../top_keys.ts";
import type { Region, Side } from "../types.ts";

export class FarKeys {
  readonly element = make("div", { class: "bar far", set: { hidden: true, role: "group", "aria-label": "where the kept token looks" } });
  private built = "";

  constructor(private readonly context: Context) {}

  /** Lists them, and gives the curves that lead out of the window; nothing where nothing is kept. */
  look(need: Need, field: HeadField, place: Place): Shape[] {
    const kept = keptOf(this.context, field.mapIndex);
    const side: Side = kept.query.length || !kept.key.length ? "query" : "key";
    const index = kept[side].at(-1);
    if (index === undefined || !findsTop(this.context, field)) {
      this.hide();
      return [];
    }
    const name = `${field.title} ${side} ${index} ${Object.values(place.region).join()}`;
    const found = topKeys(need, this.context, field, side, index);
    if (!found) {
      this.show(`${name} …`, [make("span", { class: "muted" }, "…")]);
      return [];
    }
    const token = this.context.tokens.at(need, field.mapIndex, side, index);
    // Of one kept token the bar above says which.
    const of = kept[side].length > 1 ? ` of ${side} ${whole(index)} ${visible(token ?? "…", 16)}` : "";
    this.show(`${name} ${token}`, this.list(found, side, index, of, place.region));
    return found.broken ? [] : curves(found.keys, side, index, place);
  }

  hide(): void {
    this.show("", []);
  }

  private list(found: TopKeys, side: Side, index: number, of: string, region: Region): HTMLElement[] {
    const what = side === "query" ? "keys" : "queries";
    const title = make("strong", {}, `Greatest ${what}${of}`);
    if (found.broken) return [title, make("span", { class: "muted" }, weightWords(Infinity))];
    const share = found.share === undefined ? "" : `${(100 * found.share).toFixed(1)} % of ${side === "query" ? "what it gives" : "what it receives"}`;
    return [title, ...found.keys.map((key) => this.item(key, side, index, region)), make("span", { class: "muted" }, share)];
  }

  /** A press keeps the pair, which brings it into the window. */
  private item({ index, token, value }: TopKey, side: Side, own: number, region: Region): HTMLElement {
    const where = placeOf(index, side, region);
    const at = side === "query" ? { query: [own], key: [index] } : { query: [index], key: [own] };
    const told = where === "here" ? "in the window" : where === "above" ? "before the window" : "behind the window";
    const mark = where === "here" ? "" : where === "above" ? "↑ " : "↓ ";
    const press = button("", () => this.context.update({ at }), { class: "far-key", set: { title: told } });
    press.append(
      make("span", { class: "muted" }, `${mark}${whole(index)}`),
      make("span", { class: "key-token" }, visible(token, 20)),
      make("span", { class: "key-weight" }, figure(value)),
    );
    return press;
  }

  private show(name: string, children: HTMLElement[]): void {
    if (name === this.built) return;
    this.built = name;
    this.element.hidden = !children.length;
    replace(this.element, ...children);
  }
}

/** Where a token lies, on the other side than the kept one. */
function placeOf(index: number, side: Side, { row0, row1, column0, column1 }: Region): "here" | "above" | "below" {
  const [first, behind] = side === "query" ? [column0, column1] : [row0, row1];
  return index < first ? "above" : index >= behind ? "below" : "here";
}

/** Dashed curves from the kept token to the edge of the window behind which the others lie. */
function curves(keys: TopKey[], side: Side, own: number, { left, right, region, palette }: Place): Shape[] {
  const line = own - (side === "query" ? region.row0 : region.column0);
  const lines = side === "query" ? region.row1 - region.row0 : region.column1 - region.column0;
  if (line < 0 || line >= lines) return [];
  const others = side === "query" ? region.column1 - region.column0 : region.row1 - region.row0;
  const from = TOP + (line + 0.5) * LINE_HEIGHT;
  const most = keys[0]?.value || 1;
  return keys.flatMap((key): Shape[] => {
    const where = placeOf(key.index, side, region);
    if (where === "here") return [];
    const to = where === "above" ? TOP - 6 : TOP + others * LINE_HEIGHT + 2;
    const part = Math.sqrt(key.value / most);
    const ends: [number, number][] = [[left + 4, from], [right - 4, to]];
    if (side === "key") [ends[0], ends[1]] = [[left + 4, to], [right - 4, from]];
    return [{ kind: "curve", from: ends[0], to: ends[1], stroke: palette.accent, width: 0.75 + 3 * part, opacity: 0.2 + 0.6 * part, dash: [5, 4] }];
  });
}
