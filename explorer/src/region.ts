/** Exact weights of any region, and their table. */

import type { Context } from "./context.ts";
import { csvOf } from "./exports.ts";
import type { HeadField } from "./field.ts";
import { visible as shown, whole } from "./text.ts";
import { type Region, TILE } from "./types.ts";

/** At most so many rows and columns are written into a CSV. */
export const MOST_CSV = 512;

/** The weights of a region, fetched in pieces of at most 256 × 256. */
export async function weightsOf(context: Context, field: HeadField, region: Region): Promise<Float32Array> {
  const width = region.column1 - region.column0;
  const result = new Float32Array((region.row1 - region.row0) * width);
  for (let row0 = region.row0; row0 < region.row1; row0 += TILE) {
    for (let column0 = region.column0; column0 < region.column1; column0 += TILE) {
      const piece = {
        row0,
        column0,
        row1: Math.min(row0 + TILE, region.row1),
        column1: Math.min(column0 + TILE, region.column1),
      };
      const key = `region ${field.mapIndex}/${field.head}/${Object.values(piece).join("/")}`;
      const part = await context.loader.once(key, (signal) =>
        context.source.weights(field.mapIndex, field.head, piece, signal),
      );
      const across = piece.column1 - column0;
      for (let row = row0; row < piece.row1; row += 1) {
        const start = (row - row0) * across;
        result.set(part.subarray(start, start + across), (row - region.row0) * width + column0 - region.column0);
      }
    }
  }
  return result;
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
