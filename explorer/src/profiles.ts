/** Curves beside a map: entropy and greatest weight of each row, what each column receives. */

import type { Palette } from "./palette.ts";
import type { Shape } from "./shapes.ts";
import { figure } from "./text.ts";

export interface Profile {
  values: Float32Array;
  /** The cell at the first pixel, the pixels of a cell, and how many pixels there are. */
  start: number;
  scale: number;
  length: number;
  /** How far the greatest value reaches. */
  reach: number;
  /** "right": the values go to the right of a column; "below": down from a row. */
  side: "right" | "below";
}

/** The greatest value over the cells of each pixel, NaN where the map has no cell. */
export function sampled(values: Float32Array, start: number, scale: number, length: number): Float32Array {
  const result = new Float32Array(Math.max(0, Math.ceil(length))).fill(NaN);
  for (let pixel = 0; pixel < result.length; pixel += 1) {
    const first = Math.floor(start + pixel / scale);
    const last = Math.max(first + 1, Math.floor(start + (pixel + 1) / scale));
    let best = NaN;
    for (let cell = Math.max(first, 0); cell < Math.min(last, values.length); cell += 1) {
      if (!(values[cell] <= best)) best = values[cell];
    }
    result[pixel] = best;
  }
  return result;
}

const greatestKnown = new WeakMap<Float32Array, number>();

export function greatestOf(values: Float32Array): number {
  let most = greatestKnown.get(values);
  if (most === undefined) {
    most = 0;
    for (let i = 0; i < values.length; i += 1) if (values[i] > most) most = values[i];
    greatestKnown.set(values, most);
  }
  return most;
}

/** The greatest value for people; "NaN" where no value is a number. */
export function greatestWords(values: Float32Array): string {
  return values.every(Number.isNaN) ? "NaN" : `≤ ${figure(greatestOf(values))}`;
}

/** A filled curve; 0 lies at the map, the greatest value of all (not only of those seen) at `reach`. */
export function profileShapes(profile: Profile, palette: Palette): Shape[] {
  const most = greatestOf(profile.values);
  const heights = sampled(profile.values, profile.start, profile.scale, profile.length);
  const points: number[] = [];
  const put = (along: number, away: number) =>
    points.push(...(profile.side === "right" ? [away, along] : [along, away]));
  let first = -1;
  let last = 0;
  for (let pixel = 0; pixel < heights.length; pixel += 1) {
    if (Number.isNaN(heights[pixel])) continue;
    const away = most > 0 ? (heights[pixel] / most) * profile.reach : 0;
    if (first < 0) first = pixel;
    last = pixel;
    put(pixel, away);
    put(pixel + 1, away);
  }
  if (first < 0) return [];
  const line: Shape = { kind: "path", points: [...points], stroke: palette.accent, width: 1 };
  put(last + 1, 0);
  put(first, 0);
  return [{ kind: "path", points, fill: palette.accent, opacity: 0.18 }, line];
}
