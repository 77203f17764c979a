/** What each head does with what is kept, and the ranks of the heads by it. */

import type { Context } from "./context.ts";
import { mapsOf } from "./hypotheses.ts";
import { isNothing, type Kept, keptIn, keptText } from "./kept.ts";
import type { Need } from "./loader.ts";
import type { Head } from "./ordering.ts";
import { figure, whole } from "./text.ts";
import { EXACT, type Region, TILE } from "./types.ts";

/** The values of more heads are not asked for. */
export const MOST_RANKED = 4096;

export const headKey = ({ map, head }: Head): string => `${map}/${head}`;

/** NaN for a head that has none: one of other texts, or whose weights are not there. */
export class Ranking {
  /** From 1, the greatest value; heads of the same value have the same rank. */
  readonly ranks = new Map<string, number>();
  /** How many heads have a value. */
  readonly count: number;

  constructor(readonly values: ReadonlyMap<string, number>) {
    const known = [...values].filter(([, value]) => Number.isFinite(value)).sort((a, b) => b[1] - a[1]);
    known.forEach(([key, value], at) => {
      const same = at > 0 && known[at - 1][1] === value;
      this.ranks.set(key, same ? (this.ranks.get(known[at - 1][0]) as number) : at + 1);
    });
    this.count = known.length;
  }

  value(head: Head): number {
    return this.values.get(headKey(head)) ?? NaN;
  }

  /** "0.6770 #12", for little room. */
  short(head: Head): string {
    const value = this.value(head);
    const rank = this.ranks.get(headKey(head));
    if (rank === undefined) return value === Infinity ? "NaN" : "";
    return `${value && value < 1e-3 ? value.toExponential(0) : value.toFixed(4)} #${whole(rank)}`;
  }

  /** "0.6770 · 12 of 72"; "" for a head without a value. */
  words(head: Head): string {
    const value = this.value(head);
    if (value === Infinity) return "NaN";
    if (Number.isNaN(value)) return "";
    return `${figure(value)} · ${whole(this.ranks.get(headKey(head)) as number)} of ${whole(this.count)}`;
  }
}

/** What the value of a head is, in words. */
export function keptMeaning(kept: Kept): string {
  const { query, key } = kept;
  if (!query.length) return "mean weight that all queries give to what is kept";
  if (!key.length) return "greatest weight that what is kept gives to one key";
  const rows = query.length > 1 ? "mean over the kept queries of the weight" : "weight";
  return `${rows} from query to key${key.length > 1 ? ", summed over the kept keys" : ""}`;
}

/** Finds the values of all heads, and keeps them until something else is kept. */
export class KeptValues {
  private name = "";
  private readonly known = new Map<string, number>();
  private complete?: Ranking;

  constructor(private readonly context: Context) {}

  /** Undefined where nothing is kept, and until the values of all heads are there. */
  look(need: Need): Ranking | undefined {
    const { meta } = this.context;
    const { at, map, hypothesis } = this.context.state();
    if (isNothing(at)) return undefined;
    const name = `${keptText(at)} ${map} ${hypothesis}`;
    if (name !== this.name) {
      this.name = name;
      this.known.clear();
      this.complete = undefined;
    }
    if (this.complete) return this.complete;
    const heads = mapsOf(meta, hypothesis).flatMap((of) =>
      Array.from({ length: meta.maps[of].heads }, (_, head) => ({ map: of, head })),
    );
    const asked = heads.slice(0, MOST_RANKED);
    for (const head of asked) this.one(need, head, keptIn(at, meta.maps[map], meta.maps[head.map]), at);
    if (this.known.size === asked.length) this.complete = new Ranking(new Map(this.known));
    return this.complete;
  }

  private one(need: Need, head: Head, kept: Kept, wanted: Kept): void {
    const key = headKey(head);
    if (this.known.has(key)) return;
    const value = keptValue(need, this.context, head, kept, wanted);
    if (value !== undefined) this.known.set(key, value);
  }
}

/** The value of one head; `wanted` is what is kept where this map may have a part of it only. */
export function keptValue(
  need: Need,
  context: Context,
  { map, head }: Head,
  kept: Kept,
  wanted: Kept = kept,
): number | undefined {
  if (kept.query.length < wanted.query.length || kept.key.length < wanted.key.length) return NaN;
  const { query, key } = kept;
  if (query.length && key.length) {
    if (!context.offers(map, head, EXACT)) return NaN;
    const name = `kept ${map}/${head}/${keptText(kept)}`;
    return need(name, async (signal) => Float32Array.of(await pairWeight(context, { map, head }, kept, signal)))?.[0];
  }
  const which = query.length ? "largest" : "received";
  if (!(context.meta.profiles ?? ["entropy", "received"]).includes(which)) return NaN;
  const profile = need(`profile ${map}/${head}/${which}`, (signal) =>
    context.source.profile(map, head, which, signal),
  );
  if (!profile) return undefined;
  const sum = [...query, ...key].reduce((total, index) => total + profile[index], 0);
  return sum / (query.length || context.meta.maps[map].queries);
}

/** The mean over the queries of the sum over the keys; NaN where no pair exists, infinity at a query that attends to NaN. */
async function pairWeight(context: Context, { map, head }: Head, kept: Kept, signal: AbortSignal): Promise<number> {
  let [sum, count] = [0, 0];
  for (const region of regionsOf(kept)) {
    const weights = await context.source.weights(map, head, region, signal);
    for (const column of kept.key) {
      const weight = weights[column - region.column0];
      if (column < region.column0 || column >= region.column1 || Number.isNaN(weight)) continue;
      sum += weight;
      count += 1;
    }
  }
  return count ? sum / kept.query.length : NaN;
}

/** Of each query the stretches of keys, none longer than a tile. */
function regionsOf({ query, key }: Kept): Region[] {
  const stretches: [number, number][] = [];
  for (const column of key) {
    const last = stretches.at(-1);
    if (last && column - last[0] < TILE) last[1] = column + 1;
    else stretches.push([column, column + 1]);
  }
  return query.flatMap((row) =>
    stretches.map(([column0, column1]) => ({ row0: row, row1: row + 1, column0, column1 })),
  );
}
