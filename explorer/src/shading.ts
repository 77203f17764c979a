/** How strongly each token of a text is shaded: by what the kept tokens attend to, or by who attends to them. */

import type { Context } from "./context.ts";
import type { HeadField } from "./field.ts";
import type { Kept } from "./kept.ts";
import type { Need } from "./loader.ts";
import { isSpecial } from "./running_text.ts";
import { visible } from "./text.ts";
import { EXACT, type Region, type Side, TILE } from "./types.ts";

/** A key that receives at least this part of all weight of a head is a sink. */
export const SINK = 0.3;
/** Special tokens are looked for in texts of at most so many tokens. */
const MOST_SEARCHED = 20_000;
const MOST_HIDDEN = 256;

export interface Window {
  start: number;
  stop: number;
}

export interface Shading {
  /** Of each token of the window: NaN where no pair exists, infinity where a query attends to NaN. */
  values: Float32Array;
  /** The keys that are left out. */
  hidden: ReadonlySet<number>;
  /** What part of the weight lies on them. */
  share: number;
  names: string[];
}

/**
 * Of direction "query", for each key of the window: Σ over the kept queries of their weight on it, over the number of
 * queries. Of direction "key", for each query of the window: its weight on the kept keys, summed. Where keys are hidden,
 * each row is divided by what it gives to the others. Undefined until all weights are there.
 */
export function shading(
  need: Need,
  context: Context,
  field: HeadField,
  kept: Kept,
  { direction, hide, window }: { direction: Side; hide: boolean; window: Window },
): Shading | undefined {
  if (!field.offers(EXACT) || !kept[direction].length) return undefined;
  const hidden = hide ? hiddenKeys(need, context, field) : new Set<number>();
  if (!hidden) return undefined;
  const names = [...hidden].slice(0, 3).map((index) => context.tokens.at(need, field.mapIndex, "key", index) ?? "…");
  const told = { hidden, names: names.map((name) => visible(name, 16)) };
  const found = direction === "query" ? given(need, context, field, kept.query, hidden, window) : received(need, context, field, kept.key, hidden, window);
  return found && { ...told, ...found };
}

type Found = Pick<Shading, "values" | "share">;

function given(need: Need, context: Context, field: HeadField, queries: readonly number[], hidden: ReadonlySet<number>, { start, stop }: Window): Found | undefined {
  const values = new Float32Array(stop - start).fill(NaN);
  let [share, complete] = [0, true];
  for (const row of queries) {
    const shown = block(need, context, field, { row0: row, row1: row + 1, column0: start, column1: stop });
    const out = massOn(need, context, field, row, hidden);
    if (!shown || out === undefined) complete = false;
    if (!shown || out === undefined) continue;
    share += out / queries.length;
    shown.forEach((weight, at) => add(values, at, hidden.has(start + at) ? NaN : weight / queries.length / rest(out)));
  }
  return complete ? { values, share } : undefined;
}

function received(need: Need, context: Context, field: HeadField, keys: readonly number[], hidden: ReadonlySet<number>, { start, stop }: Window): Found | undefined {
  const count = stop - start;
  const column = (key: number) => block(need, context, field, { row0: start, row1: stop, column0: key, column1: key + 1 });
  const wanted = keys.map(column);
  const out = [...hidden].map(column);
  if (![...wanted, ...out].every((one) => one !== undefined)) return undefined;
  const values = new Float32Array(count).fill(NaN);
  let share = 0;
  for (let at = 0; at < count; at += 1) {
    const mass = out.reduce((sum, one) => sum + (one?.[at] || 0), 0);
    share += Number.isFinite(mass) ? mass / count : 0;
    wanted.forEach((one, which) => add(values, at, hidden.has(keys[which]) ? NaN : (one?.[at] ?? NaN) / rest(mass)));
  }
  return { values, share };
}

function add(values: Float32Array, at: number, weight: number): void {
  if (!Number.isNaN(weight)) values[at] = (Number.isNaN(values[at]) ? 0 : values[at]) + weight;
}

/** What is left of a row; a row that gives all to what is hidden has no weights to show. */
const rest = (hidden: number): number => (hidden < 1 - 1e-6 ? 1 - hidden : Infinity);

/** What a query gives to hidden keys, wherever they are. */
function massOn(need: Need, context: Context, field: HeadField, row: number, hidden: ReadonlySet<number>): number | undefined {
  let [mass, complete] = [0, true];
  for (const key of hidden) {
    const one = block(need, context, field, { row0: row, row1: row + 1, column0: key, column1: key + 1 });
    if (!one) complete = false;
    else if (Number.isFinite(one[0])) mass += one[0];
  }
  return complete ? mass : undefined;
}

/** The weights of one row or one column of cells, in pieces. */
function block(need: Need, context: Context, { mapIndex, head }: HeadField, region: Region): Float32Array | undefined {
  const across = region.row1 - region.row0 === 1;
  const [start, stop] = across ? [region.column0, region.column1] : [region.row0, region.row1];
  const result = new Float32Array(stop - start);
  let complete = true;
  for (let at = start; at < stop; at += TILE) {
    const end = Math.min(at + TILE, stop);
    const piece = across ? { ...region, column0: at, column1: end } : { ...region, row0: at, row1: end };
    const found = need(`text ${mapIndex}/${head}/${Object.values(piece).join("/")}`, (signal) =>
      context.source.weights(mapIndex, head, piece, signal),
    );
    if (found) result.set(found, at - start);
    else complete = false;
  }
  return complete ? result : undefined;
}

/** Special tokens, and keys that receive much of all weight. */
function hiddenKeys(need: Need, context: Context, field: HeadField): Set<number> | undefined {
  const { map, mapIndex } = field;
  const found = new Set<number>();
  const received = field.profile(need, "received");
  if (!received) return undefined;
  received.forEach((weight, key) => weight >= SINK * map.queries && found.add(key));
  let complete = true;
  for (let key = 0; key < map.keys && map.keys <= MOST_SEARCHED; key += 1) {
    const token = context.tokens.at(need, mapIndex, "key", key);
    if (token === undefined) complete = false;
    else if (isSpecial(token) && found.size < MOST_HIDDEN) found.add(key);
  }
  return complete ? found : undefined;
}
