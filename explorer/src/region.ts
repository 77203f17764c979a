/** Exact weights of a region, and their CSV and NPZ files. */

import type { Context } from "./context.ts";
import { csvOf } from "./exports.ts";
import type { HeadField } from "./field.ts";
import { npzOf } from "./npz.ts";
import { visible as shown, whole } from "./text.ts";
import { EXACT, type Reduce, type Region, TILE } from "./types.ts";
import { weightsIn } from "./region_weights.ts";

/** At most so many rows and columns are written into a file. */
export const MOST_WRITTEN = 512;

/** The weights of a region, fetched in pieces of at most 256 × 256. */
export function weightsOf(context: Context, field: HeadField, region: Region): Promise<Float32Array> {
  return weightsIn(region, TILE, (piece) => {
    const key = `region ${field.mapIndex}/${field.head}/${Object.values(piece).join("/")}`;
    return context.loader.once(key, (signal) =>
      context.source.weights(field.mapIndex, field.head, piece, signal),
    );
  });
}

export function regionWords({ row0, row1, column0, column1 }: Region): string {
  return `queries ${whole(row0)}–${whole(row1 - 1)}, keys ${whole(column0)}–${whole(column1 - 1)}`;
}

interface Taken {
  region: Region;
  weights: Float32Array;
  queries: string[];
  keys: string[];
}

/** What goes into a file of a region: its first rows and columns, where it is larger than that. */
async function taken(context: Context, field: HeadField, seen: Region, kind: string): Promise<Taken> {
  if (!field.offers(EXACT, seen)) throw new Error("the exact weights of this head are not in this page");
  const region = {
    ...seen,
    row1: Math.min(seen.row1, seen.row0 + MOST_WRITTEN),
    column1: Math.min(seen.column1, seen.column0 + MOST_WRITTEN),
  };
  const cut = region.row1 < seen.row1 || region.column1 < seen.column1;
  const words = `${kind}: ${context.meta.exact ?? "exact weights"} of ${regionWords(region)}`;
  context.announce(cut ? `${words}; at most ${MOST_WRITTEN} × ${MOST_WRITTEN} are written` : words);
  return {
    region,
    weights: await weightsOf(context, field, region),
    queries: await context.tokens.range(field.mapIndex, "query", region.row0, region.row1),
    keys: await context.tokens.range(field.mapIndex, "key", region.column0, region.column1),
  };
}

/** A line for each query, a column for each key; empty where a pair does not exist, NaN where a query attends to NaN. */
export async function regionCsv(context: Context, field: HeadField, seen: Region): Promise<string> {
  const { region, weights, queries, keys } = await taken(context, field, seen, "CSV");
  const name = (index: number, token: string) => `${index} ${shown(token)}`;
  const rows: (string | number)[][] = [["query \\ key", ...keys.map((token, i) => name(region.column0 + i, token))]];
  queries.forEach((token, i) => {
    const values = weights.subarray(i * keys.length, (i + 1) * keys.length);
    rows.push([name(region.row0 + i, token), ...values]);
  });
  return csvOf(rows);
}

/**
 * The cells of a pooled level that are seen: a line for each block of queries, a column for each block of keys, with the
 * numbers of the first and the last; empty where a cell has no pair.
 */
export async function levelCsv(context: Context, field: HeadField, seen: Region, level: number, reduce: Reduce): Promise<string> {
  const { queries, keys, levels, cells } = field.map;
  const [high, wide] = cells[level];
  const id = `level ${field.mapIndex}/${field.head}/${level}/${reduce}`;
  const data = await context.loader.once(id, (signal) => context.source.pooled(field.mapIndex, field.head, level, reduce, signal));
  const span = (first: number, last: number, size: number) => {
    const [start, end] = [Math.floor(first / size), Math.ceil(last / size)];
    return { start, end: Math.min(end, start + MOST_WRITTEN), cut: end > start + MOST_WRITTEN };
  };
  const [down, across] = [span(seen.row0, seen.row1, high), span(seen.column0, seen.column1, wide)];
  const name = (at: number, size: number, count: number) => `${at * size}–${Math.min((at + 1) * size, count) - 1}`;
  const columns = Array.from({ length: across.end - across.start }, (_, at) => across.start + at);
  const rows: (string | number)[][] = [["queries \\ keys", ...columns.map((at) => name(at, wide, keys))]];
  for (let row = down.start; row < down.end; row += 1)
    rows.push([name(row, high, queries), ...columns.map((column) => data[row * levels[level][1] + column])]);
  const words = `CSV: ${reduce} of ${high} × ${wide} cells of ${regionWords(seen)}, as they are seen`;
  context.announce(down.cut || across.cut ? `${words}; at most ${MOST_WRITTEN} × ${MOST_WRITTEN} are written` : words);
  return csvOf(rows);
}

/**
 * For NumPy: weights or contributions, NaN where a pair does not exist and infinity where a query attends to NaN, the numbers of queries
 * and keys, and their tokens.
 */
export async function regionNpz(
  context: Context,
  field: HeadField,
  seen: Region,
): Promise<Uint8Array<ArrayBuffer>> {
  const { region, weights, queries, keys } = await taken(context, field, seen, "NPZ");
  const from = (start: number, count: number) => ({
    shape: [count],
    data: Int32Array.from({ length: count }, (_, i) => start + i),
  });
  return npzOf({
    [`${context.state().measure}s`]: { shape: [queries.length, keys.length], data: weights },
    queries: from(region.row0, queries.length),
    keys: from(region.column0, keys.length),
    query_tokens: queries,
    key_tokens: keys,
  });
}
