/** The order of heads by the similarity of their pooled maps. */

import { coarser, divergences, leafOrder, MOST_HEADS, type Shares, shares } from "./clustering.ts";
import type { Context } from "./context.ts";
import { HeadField } from "./field.ts";
import type { Need } from "./loader.ts";
import type { Head } from "./ordering.ts";
import { coarsest } from "./pyramid.ts";
import { pool } from "./raster.ts";
import { EXACT } from "./types.ts";

const PLAIN = { reduce: "mean", normalise: false, clip: false } as const;
const COARSEST = 64;

export interface Ordered {
  heads: Head[];
  /** From each head to the one before it, in nats; NaN of the first. */
  divergences: number[];
}

/** Undefined until all of the coarsest levels have come. */
export function bySimilarity(need: Need, context: Context, heads: Head[]): Ordered | undefined {
  if (heads.length > MOST_HEADS) return undefined;
  const found = heads.map((head) => sharesOf(need, context, head));
  if (found.some((one) => one === undefined)) return undefined;
  const between = divergences((found as Shares[]).map((one) => coarser(one, heads.length)));
  const order = leafOrder(between, heads.length);
  return {
    heads: order.map((at) => heads[at]),
    divergences: order.map((at, i) => (i ? between[order[i - 1] * heads.length + at] : NaN)),
  };
}

function sharesOf(need: Need, context: Context, { map, head }: Head): Shares | undefined {
  const field = new HeadField(context, map, head);
  const level = coarsest(field.map, (at) => field.offers(at));
  const { queries, keys } = field.map;
  if (level !== EXACT) {
    const raster = field.pooled(need, level, PLAIN);
    const [, cell] = field.map.cells[level];
    return raster && shares(finite(raster.data), raster.rows, raster.columns, (column) => Math.min(cell, keys - column * cell));
  }
  const whole = field.exact(need, { row: 0, column: 0 }, 1, PLAIN);
  if (!whole) return undefined;
  const cell = Math.ceil(Math.max(queries, keys) / COARSEST);
  const raster = cell > 1 ? pool(whole, cell, "mean") : whole;
  return shares(finite(raster.data), raster.rows, raster.columns, (column) => Math.min(cell, keys - column * cell));
}

/** Rows that attend to NaN have no shares: their infinities become NaN, which counts as 0. */
function finite(data: Float32Array): Float32Array {
  return data.includes(Infinity) ? data.map((value) => (value === Infinity ? NaN : value)) : data;
}
