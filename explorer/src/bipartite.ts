/** Which weights are drawn as lines between tokens. */

import type { Side } from "./types.ts";

export interface Link {
  row: number;
  column: number;
  weight: number;
}

export interface Selection {
  threshold: number;
  /** How many lines each token of `direction` keeps. */
  top: number;
  direction: Side;
}

/** The greatest `top` weights of each query (or key) that reach the threshold; the greatest first. */
export function links(
  weights: Float32Array,
  rows: number,
  columns: number,
  { threshold, top, direction }: Selection,
): Link[] {
  const byRow = direction === "query";
  const found: Link[] = [];
  for (let outer = 0; outer < (byRow ? rows : columns); outer += 1) {
    const own: Link[] = [];
    for (let inner = 0; inner < (byRow ? columns : rows); inner += 1) {
      const [row, column] = byRow ? [outer, inner] : [inner, outer];
      const weight = weights[row * columns + column];
      if (weight >= threshold && weight > 0 && weight < Infinity) own.push({ row, column, weight });
    }
    found.push(...own.sort((a, b) => b.weight - a.weight).slice(0, top));
  }
  return found.sort((a, b) => b.weight - a.weight);
}

/**
 * The part of the rows' weight that falls into the window of columns, averaged over the rows that have any pair; rows
 * that attend to NaN are left out.
 */
export function share(weights: Float32Array, rows: number, columns: number): number {
  let sum = 0;
  let count = 0;
  for (let row = 0; row < rows; row += 1) {
    let mass = 0;
    let any = false;
    for (const weight of weights.subarray(row * columns, (row + 1) * columns)) {
      if (Number.isNaN(weight)) continue;
      any = true;
      mass += weight;
    }
    if (!any || mass === Infinity) continue;
    count += 1;
    sum += mass;
  }
  return count ? sum / count : 0;
}

/** How many rows have a weight that is not a number. */
export function rowsOfInfinity(weights: Float32Array, columns: number): number {
  let count = 0;
  for (let start = 0; start < weights.length; start += columns) {
    if (weights.subarray(start, start + columns).includes(Infinity)) count += 1;
  }
  return count;
}
