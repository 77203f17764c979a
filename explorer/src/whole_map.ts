/** What can be told of a map whose weights are all there: parts, pooled levels, profiles. */

import type { Reduce, Region } from "./types.ts";

export interface WholeMap {
  rows: number;
  columns: number;
  /** Row-major; NaN where no pair exists, infinity where a query attends to NaN. */
  data: Float32Array;
}

export function cutOf({ columns, data }: WholeMap, { row0, row1, column0, column1 }: Region): Float32Array {
  const width = column1 - column0;
  const result = new Float32Array((row1 - row0) * width);
  for (let row = row0; row < row1; row += 1) {
    result.set(data.subarray(row * columns + column0, row * columns + column1), (row - row0) * width);
  }
  return result;
}

/** One level of a pyramid; a mean is over all pairs of its cell, and NaN where none of them exists. */
export function pooledTo(
  whole: WholeMap,
  [rows, columns]: [number, number],
  [down, across]: [number, number],
  reduce: Reduce,
): Float32Array {
  const result = new Float32Array(rows * columns).fill(NaN);
  const counts = new Uint32Array(rows * columns);
  for (let at = 0; at < whole.data.length; at += 1) {
    const [row, column] = [Math.floor(at / whole.columns), at % whole.columns];
    const cell = Math.floor(row / down) * columns + Math.floor(column / across);
    const value = whole.data[at];
    counts[cell] += 1;
    if (Number.isNaN(value)) continue;
    const before = Number.isNaN(result[cell]) ? 0 : result[cell];
    result[cell] = reduce === "max" ? Math.max(before, value) : before + value;
  }
  if (reduce === "mean") counts.forEach((count, cell) => (result[cell] /= count));
  return result;
}

/** Entropy, greatest weight or sum of each row, or what each column receives. */
export function profileOfWhole({ rows, columns, data }: WholeMap, which: string): Float32Array {
  const result = new Float32Array(which === "received" ? columns : rows);
  for (let cell = 0; cell < data.length; cell += 1) {
    const row = Math.floor(cell / columns);
    // A row that attends to NaN has no profile, and what a column receives from it is no number either.
    const value = data[cell] === Infinity ? NaN : data[cell];
    if (!(value > 0) && data[cell] !== Infinity) continue;
    if (which === "received") result[cell % columns] += value;
    else if (which === "sum") result[row] += value;
    else if (which === "largest") result[row] = Math.max(result[row], value);
    else result[row] -= value * Math.log(value);
  }
  return result;
}
