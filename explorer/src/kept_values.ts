/** What each head does with what is kept, and the ranks of the heads by it. */

import type { Context } from "./context.ts";
import type { Measured } from "./effects/effect_store.ts";
import { EFFECT_MEANINGS } from "./effects/effect_words.ts";
import { mapsOf } from "./hypotheses.ts";
import { isNothing, type Kept, keptIn, keptText } from "./kept.ts";
import type { Need } from "./loader.ts";
import { type Head, type KeptOrder, keptOrder } from "./ordering.ts";
import { figure, whole } from "./text.ts";
import { EXACT, type HeadValue, type Measure, type Region, TILE } from "./types.ts";

/** The values of more heads are not asked for. */
export const MOST_RANKED = 4096;

export const headKey = ({ map, head }: Head): string => `${map}/${head}`;

/** NaN for a head that has none: one of other texts, or whose weights are not there. */
export class Ranking {
  /** From 1, the greatest value; heads of the same value have the same rank. */
  readonly ranks = new Map<string, number>();
  /** How many heads have a value. */
  readonly count: number;

  /** `isSigned`: values are ranked by their size, and have a sign. `fault`: why there are none. */
  constructor(
    readonly values: ReadonlyMap<string, number>,
    readonly isSigned = false,
    readonly fault = "",
  ) {
    const known = [...values]
      .filter(([, value]) => Number.isFinite(value))
      .map(([key, value]) => [key, this.sized(value)] as const)
      .sort((a, b) => b[1] - a[1]);
    known.forEach(([key, value], at) => {
      const same = at > 0 && known[at - 1][1] === value;
      this.ranks.set(key, same ? (this.ranks.get(known[at - 1][0]) as number) : at + 1);
    });
    this.count = known.length;
  }

  value(head: Head): number {
    return this.values.get(headKey(head)) ?? NaN;
  }

  /** What heads are put in order by. */
  size(head: Head): number {
    return this.sized(this.value(head));
  }

  /** "0.6770 #12", for little room. */
  short(head: Head): string {
    const value = this.value(head);
    const rank = this.ranks.get(headKey(head));
    if (rank === undefined) return value === Infinity ? "NaN" : "";
    const size = Math.abs(value);
    const words = size && size < 1e-3 ? size.toExponential(0) : size.toFixed(size < 100 ? 4 : 1);
    return `${this.sign(value)}${words} #${whole(rank)}`;
  }

  /** "0.6770 · 12 of 72"; "" for a head without a value. */
  words(head: Head): string {
    const value = this.value(head);
    if (value === Infinity) return "NaN";
    if (Number.isNaN(value)) return "";
    return `${this.sign(value)}${figure(Math.abs(value))} · ${whole(this.ranks.get(headKey(head)) as number)} of ${whole(this.count)}`;
  }

  private sized(value: number): number {
    return this.isSigned ? Math.abs(value) : value;
  }

  private sign(value: number): string {
    return value < 0 ? "−" : this.isSigned ? "+" : "";
  }
}

/** What the value of a head is, in words. */
export function keptMeaning(kept: Kept, by: Measure = "weight"): string {
  const { query, key } = kept;
  if (!query.length) return `mean ${by} that all queries give to what is kept`;
  if (!key.length) return `greatest ${by} that what is kept gives to one key`;
  const rows = query.length > 1 ? `mean over the kept queries of the ${by}` : by;
  return `${rows} from query to key${key.length > 1 ? ", summed over the kept keys" : ""}`;
}

/** The same for each order by what is kept. */
export function orderMeaning(context: Context, by: KeptOrder): string {
  const { at } = context.state();
  if (by === "weight" || by === "contribution") return keptMeaning(at, by);
  if (by === "change") {
    const label = context.before()?.label ?? "before";
    const rows = at.query.length && !at.key.length;
    return rows ? `how much of the kept rows moved since ${label}, half of all differences` : `${keptMeaning(at)}, less that of ${label}`;
  }
  const { table, model } = context.effects;
  if (!table || !model) return "effect of switching off";
  return `effect on ${table.compared}, ${EFFECT_MEANINGS[model.kind]}`;
}

/** By what the heads are ranked: what they are in order by, else what is shown. */
export function rankedBy(context: Context): KeptOrder {
  const { order, measure } = context.state();
  return keptOrder(order) ?? measure;
}

/** The orders by what is kept that there are here. */
export function keptOrders(context: Context): KeptOrder[] {
  const { measure } = context.state();
  const asks = context.source.kept !== undefined;
  const orders: KeptOrder[] = [];
  if (asks || measure === "weight") orders.push("weight");
  if (measure === "contribution" || (asks && !context.contributionFault())) orders.push("contribution");
  if (context.before()) orders.push("change");
  if (context.effects.model) orders.push("effect");
  return orders;
}

/** Why an order by what is kept is not here, as an address may name it; "" where it is. */
export function orderFault(context: Context, by: KeptOrder): string {
  if (keptOrders(context).includes(by)) return "";
  if (by === "effect") return "it needs the model, which is not here";
  if (by === "change") return context.state().words ? "changes are told between tokens: turn Words off" : "there is no other record beside this one";
  return context.contributionFault() || `choose ${by} in place of ${context.state().measure}`;
}

/** Finds the values of all heads, and keeps them until something else is kept. */
export class KeptValues {
  private name = "";
  private readonly known = new Map<string, number>();
  private complete?: Ranking;
  private measured?: { of: Measured; ranking: Ranking };

  constructor(private readonly context: Context) {}

  /** Undefined where nothing is kept, and until the values of all heads are there. */
  look(need: Need, by: KeptOrder): Ranking | undefined {
    if (by === "effect") return this.effects();
    const { at, map, hypothesis } = this.context.state();
    if (isNothing(at)) return undefined;
    const name = `${by} ${keptText(at)} ${map} ${hypothesis} ${this.context.before()?.label}`;
    if (name !== this.name) {
      this.name = name;
      this.known.clear();
      this.complete = undefined;
    }
    return (this.complete ??= by === "change" ? this.changes(need, at) : this.values(need, at, by));
  }

  /** All heads of all maps of a translation. */
  private places(): number[] {
    return mapsOf(this.context.meta, this.context.state().hypothesis);
  }

  private values(need: Need, at: Kept, by: Measure): Ranking | undefined {
    const { meta, source } = this.context;
    const { map, measure } = this.context.state();
    if (by !== measure && !source.kept) return undefined;
    const heads = this.places()
      .flatMap((of) => Array.from({ length: meta.maps[of].heads }, (_, head) => ({ map: of, head })))
      .slice(0, MOST_RANKED);
    for (const head of heads) {
      if (this.known.has(headKey(head))) continue;
      const kept = keptIn(at, meta.maps[map], meta.maps[head.map]);
      const value = keptValue(need, this.context, head, { kept, wanted: at, by });
      if (value !== undefined) this.known.set(headKey(head), value);
    }
    return this.known.size === heads.length ? new Ranking(new Map(this.known)) : undefined;
  }

  private changes(need: Need, at: Kept): Ranking | undefined {
    const before = this.context.before();
    const { map } = this.context.state();
    if (!before) return undefined;
    const found = need(`changes ${before.label} ${map}/${keptText(at)}`, async (signal): Promise<Changes> => {
      try {
        return { heads: (await this.context.source.changes?.(before.source, map, at, signal)) ?? [], fault: "" };
      } catch (error) {
        if (signal.aborted) throw error;
        return { heads: [], fault: error instanceof Error ? error.message : String(error) };
      }
    });
    if (!found) return undefined;
    return new Ranking(new Map(found.heads.map((head) => [headKey(head), head.value ?? NaN])), true, found.fault);
  }

  /** Of the last run of all heads of this text. */
  private effects(): Ranking | undefined {
    const { table, model } = this.context.effects;
    if (!table || !model) return undefined;
    if (this.measured?.of === table) return this.measured.ranking;
    const { maps } = this.context.meta;
    const values = new Map<string, number>();
    for (const { module, head, value } of table.effects) {
      if (head === null) continue;
      for (const map of this.places()) if (maps[map].name === module) values.set(headKey({ map, head }), value ?? NaN);
    }
    this.measured = { of: table, ranking: new Ranking(values, model.kind !== "encoder") };
    return this.measured.ranking;
  }
}

interface Changes {
  heads: HeadValue[];
  fault: string;
}

/** What is kept of a map; `wanted`: what is kept, where this map may have a part of it only. */
interface Asked {
  kept: Kept;
  wanted?: Kept;
  by?: Measure;
}

/** The value of one head. */
export function keptValue(need: Need, context: Context, { map, head }: Head, asked: Asked): number | undefined {
  const { kept, wanted = kept, by = context.state().measure } = asked;
  if (kept.query.length < wanted.query.length || kept.key.length < wanted.key.length) return NaN;
  const { source } = context;
  // All heads of a map are asked for together, where that can be; a mean is of its own.
  if (source.kept && head < context.meta.maps[map].heads) {
    return need(`kept ${by} ${map}/${keptText(kept)}`, async (signal) => {
      const values = await source.kept?.(map, kept, by, signal);
      return values ?? new Float32Array(context.meta.maps[map].heads).fill(NaN);
    })?.[head];
  }
  const { query, key } = kept;
  if (query.length && key.length) {
    if (!offersPairs(context, { map, head }, kept)) return NaN;
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

/** Whether all single weights of what is kept are there. */
function offersPairs(context: Context, { map, head }: Head, { query, key }: Kept): boolean {
  const cell = (row: number, column: number) => ({ row0: row, row1: row + 1, column0: column, column1: column + 1 });
  return query.every((row) => key.every((column) => context.offers(map, head, EXACT, cell(row, column))));
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
