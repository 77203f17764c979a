/** The mean of several heads as one more head of a map, computed from their weights. */

import { mapsOf } from "./hypotheses.ts";
import type { Head } from "./ordering.ts";
import { weightsIn } from "./region_weights.ts";
import type { Pin, State } from "./state.ts";
import { type AttentionMap, EXACT, type Meta, type Reduce, type Region, type Source, TILE } from "./types.ts";
import { cutOf, pooledTo, profileOfWhole, type WholeMap } from "./whole_map.ts";

export const MEANS = ["", "layer", "all", "pins", "each"] as const;
export type Mean = (typeof MEANS)[number];

/** Of longer maps the mean is not computed: the page would have to hold all weights of all heads. */
export const MOST_AVERAGED = 1024;
/** So many means are kept. */
const MOST_HELD = 8;

/** The heads that are averaged; none where one head is shown, or where the map is too long. */
export function members(meta: Meta, { mean, map, pins, hypothesis }: State): Head[] {
  const own = meta.maps[map];
  if (!mean || mean === "each" || !canAverage(own)) return [];
  if (mean === "layer") return headsOf(meta, map);
  if (mean === "pins") return alikePins(meta, map, pins);
  return mapsOf(meta, hypothesis).flatMap((at) => (alike(meta.maps[at], own) ? headsOf(meta, at) : []));
}

/** The pinned heads that are of the same texts as a map. */
export function alikePins(meta: Meta, map: number, pins: readonly Pin[]): Head[] {
  return pins.filter(([at]) => alike(meta.maps[at], meta.maps[map])).map(([at, head]) => ({ map: at, head }));
}

function alike(a: AttentionMap, b: AttentionMap): boolean {
  return a.kind === b.kind && a.queries === b.queries && a.keys === b.keys && String(a.texts) === String(b.texts);
}

export function canAverage(map: AttentionMap): boolean {
  return Math.max(map.queries, map.keys) <= MOST_AVERAGED;
}

function headsOf(meta: Meta, map: number): Head[] {
  return Array.from({ length: meta.maps[map].heads }, (_, head) => ({ map, head }));
}

/** Sets of heads by the numbers of the heads that stand for their means, which lie beyond those of the map. */
export class Means {
  private readonly sets = new Map<string, { name: string; head: number; members: readonly Head[] }>();

  constructor(private readonly meta: Meta) {}

  /** The head of a map that is the mean of some heads. */
  head(map: number, all: readonly Head[]): number {
    const name = `${map}: ${all.map((one) => `${one.map}.${one.head}`).join()}`;
    let found = this.sets.get(name);
    if (!found) {
      found = { name, head: this.meta.maps[map].heads + this.sets.size, members: all };
      this.sets.set(name, found);
    }
    return found.head;
  }

  /** Undefined for a head of the map itself. */
  of(map: number, head: number): readonly Head[] | undefined {
    if (head < this.meta.maps[map].heads) return undefined;
    return [...this.sets.values()].find((one) => one.head === head && one.name.startsWith(`${map}:`))?.members;
  }
}

/** The same source, with the means that are asked for as more heads. */
export function withMeans(source: Source, meta: Meta): { source: Source; means: Means } {
  const means = new Means(meta);
  const held = new Map<string, Promise<WholeMap>>();
  const whole = (map: number, head: number, heads: readonly Head[]) => {
    const key = `${map}/${head}`;
    const there = held.get(key);
    if (there) return there;
    const asked = average(source, meta.maps[map], heads);
    held.set(key, asked);
    asked.catch(() => held.delete(key));
    for (const old of held.keys()) if (held.size > MOST_HELD) held.delete(old);
    return asked;
  };
  const offers = (map: number, head: number, level: number, region?: Region) =>
    source.offers?.(map, head, level, region) ?? true;
  const asked = {
    weights: async (map: number, head: number, region: Region, signal?: AbortSignal) => {
      const heads = means.of(map, head);
      return heads ? cutOf(await whole(map, head, heads), region) : source.weights(map, head, region, signal);
    },
    pooled: async (map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal) => {
      const heads = means.of(map, head);
      if (!heads) return source.pooled(map, head, level, reduce, signal);
      const { levels, cells } = meta.maps[map];
      return pooledTo(await whole(map, head, heads), levels[level], cells[level], reduce);
    },
    profile: async (map: number, head: number, which: string, signal?: AbortSignal) => {
      const heads = means.of(map, head);
      return heads ? profileOfWhole(await whole(map, head, heads), which) : source.profile(map, head, which, signal);
    },
    offers: (map: number, head: number, level: number, region?: Region) => {
      const heads = means.of(map, head);
      return heads ? heads.every((one) => offers(one.map, one.head, EXACT)) : offers(map, head, level, region);
    },
  };
  return { source: Object.assign(Object.create(source) as Source, asked), means };
}

/** Σ over the heads of their weights, over their number; NaN where no head has the pair, infinity where one has NaN. */
async function average(source: Source, map: AttentionMap, heads: readonly Head[]): Promise<WholeMap> {
  const all = { row0: 0, row1: map.queries, column0: 0, column1: map.keys };
  const data = new Float32Array(map.queries * map.keys).fill(NaN);
  for (const { map: at, head } of heads) {
    const weights = await weightsIn(all, TILE, (piece) => source.weights(at, head, piece));
    weights.forEach((weight, cell) => {
      if (!Number.isNaN(weight)) data[cell] = (Number.isNaN(data[cell]) ? 0 : data[cell]) + weight / heads.length;
    });
  }
  return { rows: map.queries, columns: map.keys, data };
}
