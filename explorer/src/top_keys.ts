/** The greatest weights of a row or a column of any length, as a server finds them. */

import type { Context } from "./context.ts";
import type { HeadField } from "./field.ts";
import type { Need } from "./loader.ts";
import type { Side, TopList } from "./types.ts";

export const MOST_LISTED = 8;

/** One of them: where it is, what it is called, and its weight or contribution. */
export interface TopKey {
  index: number;
  token: string;
  value: number;
}

export interface TopKeys {
  keys: TopKey[];
  /** Which part they are of what the row gives; undefined of contributions, which have no sum. */
  share?: number;
  /** Whether the row attends to NaN. */
  broken: boolean;
}

/** Whether the source finds them: of heads of its own, between tokens. */
export function findsTop(context: Context, field: HeadField): boolean {
  return context.source.top !== undefined && field.head < field.map.heads && !context.tokenMaps;
}

/** Undefined until they have come. `side`: of a query its keys, of a key its queries. */
export function topKeys(need: Need, context: Context, field: HeadField, side: Side, index: number): TopKeys | undefined {
  const by = context.meta.quantity ?? "weight";
  const name = `top ${field.mapIndex}/${field.head}/${side}/${index}/${by}`;
  const found = need(name, async (signal) => {
    const list = await context.source.top?.(field.mapIndex, field.head, { side, index, count: MOST_LISTED, by }, signal);
    if (!list) throw new Error("the source does not find the greatest weights of a row");
    return list;
  });
  return found && listed(found, by);
}

function listed({ indices, tokens, weights, contributions, rest, broken }: TopList, by: string): TopKeys {
  const values = by === "contribution" && contributions ? contributions : weights;
  const keys = indices.map((index, at) => ({ index, token: tokens[at], value: values[at] }));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return { keys, broken, share: by === "weight" && sum + rest > 0 ? sum / (sum + rest) : undefined };
}
