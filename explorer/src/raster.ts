/** Operations on arrays of weights before drawing: pooling, row normalisation, difference, quantiles. */

import type { Reduce, Region } from "./types.ts";

/** A row-major array with a name that is the same only for the same content. */
export interface Raster {
  id: string;
  rows: number;
  columns: number;
  data: Float32Array;
}

/**
 * Pooled by `factor` × `factor`; a cell without any pair stays NaN. The mean is over all pairs of a cell, those that do
 * not exist with the weight 0, as the means of pooled levels are.
 */
export function pool(raster: Raster, factor: number, reduce: Reduce): Raster {
  const rows = Math.ceil(raster.rows / factor);
  const columns = Math.ceil(raster.columns / factor);
  const result = new Float32Array(rows * columns).fill(NaN);
  const counts = new Uint32Array(rows * columns);
  for (let row = 0; row < raster.rows; row += 1) {
    for (let column = 0; column < raster.columns; column += 1) {
      const value = raster.data[row * raster.columns + column];
      const cell = Math.floor(row / factor) * columns + Math.floor(column / factor);
      counts[cell] += 1;
      if (value !== value) continue;
      if (result[cell] !== result[cell]) result[cell] = value;
      else if (reduce === "max") result[cell] = Math.max(result[cell], value);
      else result[cell] += value;
    }
  }
  if (reduce === "mean") for (let cell = 0; cell < result.length; cell += 1) result[cell] /= counts[cell];
  return { id: `${raster.id} ${reduce} ${factor}`, rows, columns, data: result };
}

/** The greatest finite value of each row, 0 where there is none. */
export function rowMaxima(raster: Raster): Float32Array {
  const maxima = new Float32Array(raster.rows);
  for (let row = 0; row < raster.rows; row += 1) {
    let best = 0;
    for (let i = row * raster.columns; i < (row + 1) * raster.columns; i += 1)
      if (raster.data[i] > best && raster.data[i] < Infinity) best = raster.data[i];
    maxima[row] = best;
  }
  return maxima;
}

/** Every row divided by its maximum, which `maxima` tells. */
export function normalised(raster: Raster, maxima: (row: number) => number): Raster {
  const data = new Float32Array(raster.data.length);
  for (let row = 0; row < raster.rows; row += 1) {
    const most = maxima(row) || 1;
    for (let i = row * raster.columns; i < (row + 1) * raster.columns; i += 1) data[i] = raster.data[i] / most;
  }
  return { ...raster, id: `${raster.id} rows`, data };
}

/** Infinite where either weight is not a number, NaN where either pair does not exist. */
export function difference(a: Raster, b: Raster): Raster {
  const data = new Float32Array(a.data.length);
  for (let i = 0; i < data.length; i += 1) data[i] = less(a.data[i], b.data[i]);
  return { ...a, id: `${a.id} - ${b.id}`, data };
}

/** a − b of two weights: infinite where either is, which stands for NaN. */
export function less(a: number, b: number): number {
  if (a !== a || b !== b) return NaN;
  return Number.isFinite(a) && Number.isFinite(b) ? a - b : Infinity;
}

/** The greatest finite size. */
export function greatest(data: Float32Array): number {
  let best = 0;
  for (let i = 0; i < data.length; i += 1) {
    const size = Math.abs(data[i]);
    if (size > best && size < Infinity) best = size;
  }
  return best;
}

const MOST_SORTED = 1 << 14;
/** With each frame that is drawn. */
const MOST_IN_SIGHT = 1 << 12;

/** The size that a part of all finite sizes above 0 does not exceed, from an even choice of at most 16,384 of them. */
export function quantile(data: Float32Array, part: number): number {
  const every = Math.ceil(data.length / MOST_SORTED);
  const sizes: number[] = [];
  for (let i = 0; i < data.length; i += every) {
    const size = Math.abs(data[i]);
    if (size > 0 && size < Infinity) sizes.push(size);
  }
  sizes.sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(Math.floor(part * sizes.length), sizes.length - 1)] : 0;
}

/** As `quantile`, of some rows and columns of several rasters; of part 1 the greatest of all of them. */
export function quantileIn(parts: readonly { raster: Raster; cells: Region }[], part: number): number {
  const count = parts.reduce((sum, { cells }) => sum + (cells.row1 - cells.row0) * (cells.column1 - cells.column0), 0);
  // Odd, so that it meets all columns.
  const every = part < 1 ? Math.ceil(count / MOST_IN_SIGHT) | 1 : 1;
  const sizes: number[] = [];
  let [at, best] = [0, 0];
  for (const { raster, cells } of parts) {
    const width = cells.column1 - cells.column0;
    const size = (cells.row1 - cells.row0) * width;
    for (; at < size; at += every) {
      const row = cells.row0 + Math.floor(at / width);
      const value = Math.abs(raster.data[row * raster.columns + cells.column0 + (at % width)]);
      if (!(value > 0 && value < Infinity)) continue;
      if (part < 1) sizes.push(value);
      else if (value > best) best = value;
    }
    at -= size;
  }
  sizes.sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(Math.floor(part * sizes.length), sizes.length - 1)] : best;
}

/** The column of the greatest value of each row, -1 where a row has no pair, or attends to NaN. */
export function argmaxima(raster: Raster): Int32Array {
  const found = new Int32Array(raster.rows).fill(-1);
  for (let row = 0; row < raster.rows; row += 1) {
    let best = -Infinity;
    for (let column = 0; column < raster.columns; column += 1) {
      const value = raster.data[row * raster.columns + column];
      if (value === Infinity) {
        found[row] = -1;
        break;
      }
      if (value > best) {
        best = value;
        found[row] = column;
      }
    }
  }
  return found;
}
