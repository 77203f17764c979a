/** Token labels along the sides of a map: all where there is room, every second, fifth, tenth, ... where not. */

import type { Palette } from "./palette.ts";
import { type Shape, TEXT_SIZE } from "./shapes.ts";
import { visible, whole } from "./text.ts";

const ROOM = 13;
const ROOM_WITH_INDEX = 22;
const LONGEST_LABEL = 24;
const GAP = 8;

export interface Tick {
  index: number;
  /** Pixels from the start of the ruler to the middle of the cell. */
  at: number;
}

/** How many cells lie between two labels: 1, 2, 5, 10, 20, ... */
export function stepFor(scale: number): number {
  if (scale >= ROOM) return 1;
  for (let power = 1; ; power *= 10) {
    for (const times of [1, 2, 5])
      if (times * power > 1 && times * power * scale >= ROOM_WITH_INDEX) return times * power;
  }
}

/** The labels of a ruler of `length` pixels whose first pixel is at cell `start`. */
export function ticks(start: number, scale: number, length: number, count: number): Tick[] {
  const step = stepFor(scale);
  const found: Tick[] = [];
  const last = Math.min(count - 1, Math.ceil(start + length / scale));
  for (let index = Math.max(0, Math.ceil(start / step) * step - step); index <= last; index += step) {
    const at = (index + 0.5 - start) * scale;
    if (at >= 0 && at <= length) found.push({ index, at });
  }
  return found;
}

/** Of all tokens every so many has its number. */
const NUMBERED = 5;

/** "1,200 the"; only "the" of most where every token is named. */
export function label(index: number, token: string | undefined, step: number): { index: string; token: string } {
  const shown = token === undefined ? "…" : visible(token, LONGEST_LABEL);
  return { index: step > 1 || index % NUMBERED === 0 ? whole(index) : "", token: shown };
}

/** The text, or as much of its beginning as has room. */
export function fitted(text: string, room: number, width: (text: string) => number): string {
  if (width(text) <= room) return text;
  const characters = [...text.replace(/…$/, "")];
  while (characters.length > 1 && width(`${characters.join("")}…`) > room) characters.pop();
  return `${characters.join("")}…`;
}

export interface Ruler {
  side: "left" | "top";
  start: number;
  scale: number;
  length: number;
  count: number;
  token(index: number): string | undefined;
  /** How long a label may be, and how long a text is, in pixels. */
  room: number;
  width(text: string): number;
  /** Cells whose labels stand out: under the pointer, chosen. */
  strong: readonly number[];
}

/** Shapes of a ruler; the left one ends at x = 0, the top one at y = 0. */
export function rulerShapes(ruler: Ruler, palette: Palette): Shape[] {
  const step = stepFor(ruler.scale);
  const shapes: Shape[] = [];
  const strong = [...new Set(ruler.strong)].map((index) => ({ index, at: (index + 0.5 - ruler.start) * ruler.scale }));
  const inSight = strong.filter(({ at }) => at >= 0 && at <= ruler.length);
  const free = (tick: Tick) =>
    inSight.every((other) => Math.abs(other.at - tick.at) >= ROOM || other.index === tick.index);
  for (const tick of ticks(ruler.start, ruler.scale, ruler.length, ruler.count)) {
    if (!free(tick) || inSight.some((other) => other.index === tick.index)) continue;
    shapes.push(...labelShapes(ruler, tick, step, palette, false));
  }
  for (const tick of inSight) shapes.push(...labelShapes(ruler, tick, Math.max(step, 2), palette, true));
  return shapes;
}

function labelShapes(ruler: Ruler, tick: Tick, step: number, palette: Palette, bold: boolean): Shape[] {
  const text = label(tick.index, ruler.token(tick.index), step);
  const indexWidth = text.index ? ruler.width(text.index) + GAP : 0;
  const token = fitted(text.token, ruler.room - GAP - indexWidth, ruler.width);
  const left = ruler.side === "left";
  const along = { x: left ? -8 : tick.at, y: left ? tick.at : -8 };
  const ink = bold ? palette.accent : palette.ink;
  const anchor = left ? "end" : "start";
  const mark: Shape = {
    kind: "path",
    points: left ? [-4, tick.at, 0, tick.at] : [tick.at, -4, tick.at, 0],
    stroke: bold ? palette.accent : palette.line,
    width: bold ? 2 : 1,
  };
  const shapes: Shape[] = [mark];
  const style = { kind: "text", anchor, turn: !left, bold, size: TEXT_SIZE - (step > 1 ? 1 : 0) } as const;
  shapes.push({ ...style, ...along, text: token, colour: ink });
  const beside = 2 * GAP + ruler.width(token);
  const away = left ? { x: -beside, y: tick.at } : { x: tick.at, y: -beside };
  if (text.index) shapes.push({ ...style, ...away, text: text.index, colour: bold ? palette.accent : palette.muted });
  return shapes;
}
