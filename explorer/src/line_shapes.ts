/** Shapes of the lines view: curves between two columns of tokens, and token labels. */

import type { Mark } from "./alignment.ts";
import type { Link } from "./bipartite.ts";
import type { HeadStyle } from "./head_colours.ts";
import { isNothing, type Kept } from "./kept.ts";
import { signShapes } from "./mark_shapes.ts";
import type { GoldMark } from "./matching.ts";
import type { Palette } from "./palette.ts";
import { cutToWidth, type Shape } from "./shapes.ts";
import { figure, visible, whole } from "./text.ts";
import type { Region, Side } from "./types.ts";

export const LINE_HEIGHT = 21;
export const TOP = 34;
/** Of wide labels the numbers are told too. */
export const WIDE_LABEL = 172;

/** Where queries and keys stand, which of them, the token under the pointer, and what is kept. */
export interface Place {
  left: number;
  right: number;
  /** How wide the names of tokens may be; their numbers stand beyond, where there is room. */
  label: number;
  region: Region;
  hovered?: { side: Side; index: number };
  kept: Kept;
  palette: Palette;
}

/** Where curves begin and end beside the names. */
const GAP = 4;

/** The height of the middle of some lines. */
const middle = (first: number, behind: number): number => TOP + ((first + behind) / 2) * LINE_HEIGHT;
const at = (line: number): number => middle(line, line + 1);

/** Curves of weights, the greatest over the others; `faint` where links are marked, of which they are the ground. */
export function weightCurves(
  found: Link[],
  { left, right, region, hovered, kept, palette }: Place,
  faint: boolean,
  style?: HeadStyle,
): Shape[] {
  const most = found[0]?.weight || 1;
  const shapes: Shape[] = [];
  for (const { row, column, weight } of [...found].reverse()) {
    const [query, key] = [region.row0 + row, region.column0 + column];
    const both = kept.query.includes(query) && kept.key.includes(key);
    const own = hovered
      ? (hovered.side === "query" ? query : key) === hovered.index
      : isNothing(kept) || (kept.query.length ? kept.query.includes(query) : kept.key.includes(key));
    const part = Math.sqrt(weight / most);
    shapes.push({
      kind: "curve",
      from: [left + GAP, at(row)],
      to: [right - GAP, at(column)],
      stroke: style?.stroke ?? (both ? palette.ink : palette.accent),
      dash: style?.dash,
      width: 0.75 + 3 * part,
      opacity: (own ? 0.15 + 0.85 * part : 0.04) * (faint ? 0.5 : 1),
    });
    if (!own || style || (!hovered && !kept.query.length && !kept.key.length)) continue;
    const fromQuery = hovered ? hovered.side === "query" : kept.query.length > 0;
    const place = fromQuery ? { x: right - 12, y: at(column) - 7 } : { x: left + 12, y: at(row) - 7 };
    const anchor = fromQuery ? "end" : "start";
    shapes.push({ kind: "text", ...place, text: figure(weight), colour: palette.ink, size: 11, anchor });
  }
  return shapes;
}

/** Links that people made: whole for sure ones, dashed for possible ones, from word to word. */
export function goldCurves(marks: GoldMark[], place: Place): Shape[] {
  const { left, right, region, palette } = place;
  return marks
    .filter((mark) => isSeen(mark, place))
    .flatMap(({ row0, row1, column0, column1, sure }): Shape[] => [
      {
        kind: "curve",
        from: [left + GAP, middle(row0 - region.row0, row1 - region.row0)],
        to: [right - GAP, middle(column0 - region.column0, column1 - region.column0)],
        stroke: palette.gold,
        // Wide enough to be seen below a link that is right.
        width: 4,
        opacity: 0.85,
        dash: sure ? undefined : [6, 5],
      },
      ...bracket(left + GAP, row0 - region.row0, row1 - region.row0, palette.gold),
      ...bracket(right - GAP, column0 - region.column0, column1 - region.column0, palette.gold),
    ]);
}

/** The links of a method: a disc on each, a cross on those that are wrong, side by side where a query has several. */
export function linkCurves(marks: Mark[], place: Place): Shape[] {
  const { left, right, region, palette } = place;
  const counts = new Map<number, number>();
  return marks
    .filter(({ row, column }) => isSeen({ row0: row, row1: row + 1, column0: column, column1: column + 1 }, place))
    .flatMap(({ row, column, sign = "link" }): Shape[] => {
      const count = counts.get(row) ?? 0;
      counts.set(row, count + 1);
      const from: [number, number] = [left + GAP, at(row - region.row0)];
      const to: [number, number] = [right - GAP, at(column - region.column0)];
      return [
        { kind: "curve", from, to, stroke: palette.ink, width: 1.25, opacity: 0.9 },
        ...signShapes(sign, ...along(from, to, 0.1 + 0.06 * count), 4),
      ];
    });
}

/** The tokens of both sides with their numbers, and what the sides are. */
export function tokenLabels(
  cross: boolean,
  { left, right, label, region, hovered, kept, palette }: Place,
  token: (side: Side, index: number) => string | undefined,
): Shape[] {
  const shapes: Shape[] = [];
  const put = (side: Side, first: number, last: number, x: number, anchor: "start" | "end") => {
    const name = side === "query" ? (cross ? "target (query)" : "query") : cross ? "source (key)" : "key";
    shapes.push({ kind: "text", x, y: 16, text: name, anchor, colour: palette.muted, size: 11 });
    for (let index = first; index < last; index += 1) {
      const y = at(index - first);
      const isKept = kept[side].includes(index);
      const bold = isKept || (hovered?.side === side && hovered.index === index);
      const text = token(side, index);
      const shown = cutToWidth(text === undefined ? "…" : visible(text, 16), Math.min(label - 12, 112), { bold });
      shapes.push({ kind: "text", x, y, text: shown, anchor, bold, colour: bold ? palette.accent : palette.ink });
      if (label < WIDE_LABEL) continue;
      const away = anchor === "end" ? x - 122 : x + 122;
      shapes.push({ kind: "text", x: away, y, text: whole(index), anchor, colour: palette.muted, size: 10 });
    }
  };
  put("query", region.row0, region.row1, left - 6, "end");
  put("key", region.column0, region.column1, right + 6, "start");
  return shapes;
}

/** A point of a curve, a part of the way along it. */
function along(from: [number, number], to: [number, number], part: number): [number, number] {
  const middle = (from[0] + to[0]) / 2;
  const bend = 3 * part * (1 - part) * middle;
  const risen = part * part * (3 - 2 * part);
  return [(1 - part) ** 3 * from[0] + bend + part ** 3 * to[0], from[1] + (to[1] - from[1]) * risen];
}

/** Whether both ends are in the window, and one of them is the token under the pointer, if there is one. */
function isSeen({ row0, row1, column0, column1 }: Region, { region, hovered }: Place): boolean {
  if (row1 <= region.row0 || row0 >= region.row1 || column1 <= region.column0 || column0 >= region.column1) return false;
  if (!hovered) return true;
  const [first, behind] = hovered.side === "query" ? [row0, row1] : [column0, column1];
  return hovered.index >= first && hovered.index < behind;
}

/** Holds the tokens of one word together. */
function bracket(x: number, first: number, behind: number, stroke: string): Shape[] {
  if (behind - first < 2) return [];
  return [{ kind: "path", points: [x, at(first) - 6, x, at(behind - 1) + 6], stroke, width: 2 }];
}
