/** Exact weights of any region, and their table. */

import type { Context } from "./context.ts";
import { csvOf } from "./exports.ts";
import type { HeadField } from "./field.ts";
import { visible as shown, whole } from "./text.ts";
import { type Region, TILE } from "./types.ts";
import { weightsIn } from "./whole.ts";

/** At most so many rows and columns are written into a CSV. */
export const MOST_CSV = 512;

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

/** A line for each query, a column for each key; empty where a pair does not exist. */
export async function regionCsv(context: Context, field: HeadField, seen: Region): Promise<string> {
  const region = {
    ...seen,
    row1: Math.min(seen.row1, seen.row0 + MOST_CSV),
    column1: Math.min(seen.column1, seen.column0 + MOST_CSV),
  };
  const cut = region.row1 < seen.row1 || region.column1 < seen.column1;
  const words = `${context.meta.exact ?? "exact weights"} of ${regionWords(region)}`;
  context.announce(cut ? `CSV: ${words}; at most ${MOST_CSV} × ${MOST_CSV} are written` : `CSV: ${words}`);
  const weights = await weightsOf(context, field, region);
  const queries = await context.tokens.range(field.mapIndex, "query", region.row0, region.row1);
  const keys = await context.tokens.range(field.mapIndex, "key", region.column0, region.column1);
  const name = (index: number, token: string) => `${index} ${shown(token)}`;
  const rows: (string | number)[][] = [["query \\ key", ...keys.map((token, i) => name(region.column0 + i, token))]];
  queries.forEach((token, i) => {
    const values = weights.subarray(i * keys.length, (i + 1) * keys.length);
    rows.push([name(region.row0 + i, token), ...values]);
  });
  return csvOf(rows);
}
