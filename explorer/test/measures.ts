/** What a server answers of synthetic atlases about heads: kept values, changes, norms and contributions. */

import type { HeadValue, Measure, Reduce, TopList } from "../src/types.ts";
import { noise, type SyntheticAtlas, type SyntheticMap } from "./synthetic.ts";

/** ‖v W‖ of a key: 0 of the first, which is a sink. */
export function norm(map: SyntheticMap, head: number, column: number): number {
  return column === 0 ? 0 : Math.fround(0.5 + 3 * noise(column, head, map.map.name.length));
}

/** The same atlas, whose maps say that they have norms. */
export function withNorms(atlas: SyntheticAtlas): SyntheticAtlas {
  const maps = atlas.maps.map((one) => ({ ...one, map: { ...one.map, norms: true } }));
  return { meta: { ...atlas.meta, maps: maps.map(({ map }) => map) }, maps };
}

export function norms(map: SyntheticMap, head: number): Float32Array {
  return Float32Array.from({ length: map.map.keys }, (_, column) => norm(map, head, column));
}

export function contribution(map: SyntheticMap, head: number, row: number, column: number): number {
  const weight = Math.fround(map.weight(head, row, column));
  return Number.isFinite(weight) ? weight * norm(map, head, column) : weight;
}

export function pooledContributions(map: SyntheticMap, head: number, level: number, reduce: Reduce): Float32Array {
  const { queries, keys } = map.map;
  const [rows, columns] = map.map.levels[level];
  const [high, wide] = map.map.cells[level];
  const result = new Float32Array(rows * columns).fill(NaN);
  for (let row = 0; row < queries; row += 1) {
    for (let column = 0; column < keys; column += 1) {
      const value = contribution(map, head, row, column);
      if (Number.isNaN(value)) continue;
      const cell = Math.floor(row / high) * columns + Math.floor(column / wide);
      const before = Number.isNaN(result[cell]) ? 0 : result[cell];
      result[cell] = reduce === "max" ? Math.max(before, value) : before + value / (high * wide);
    }
  }
  return result;
}

/** The greatest weights of a row, or of a column, as `top_values` of Python gives them. */
export function topList(map: SyntheticMap, head: number, query: URLSearchParams): TopList {
  const [side, index, count] = [query.get("side"), Number(query.get("index")), Number(query.get("count"))];
  const others = side === "query" ? map.map.keys : map.map.queries;
  const pair = (other: number): [number, number] => (side === "query" ? [index, other] : [other, index]);
  const all = Array.from({ length: others }, (_, other) => map.weight(head, ...pair(other)));
  const broken = side === "query" && all.some((weight) => weight === Infinity);
  const weight = (other: number) => (Number.isFinite(all[other]) ? Math.fround(all[other]) : 0);
  const by = (other: number) => (query.get("by") === "contribution" ? contribution(map, head, ...pair(other)) : weight(other));
  const indices = broken ? [] : [...all.keys()].filter((other) => weight(other) > 0).sort((a, b) => by(b) - by(a)).slice(0, count);
  const weights = indices.map(weight);
  const total = (some: Iterable<number>) => [...some].reduce((sum, one) => sum + one, 0);
  return {
    indices,
    weights,
    contributions: map.map.norms ? indices.map((other) => contribution(map, head, ...pair(other))) : null,
    tokens: indices.map((other) => map.token(side === "query" ? "key" : "query", other)),
    rest: total([...all.keys()].map(weight)) - total(weights),
    broken,
  };
}

type Indices = number[] | undefined;

export function indices(text: string | null): Indices {
  return text === null || text === "-" ? undefined : text.split(".").map(Number);
}

/** Of one head the mean over queries of the sum over keys; without keys of the greatest. */
export function keptOfHead(map: SyntheticMap, head: number, queries: Indices, keys: Indices, by: Measure): number {
  const value = (row: number, column: number) => (by === "weight" ? map.weight(head, row, column) : contribution(map, head, row, column));
  const rows = queries ?? Array.from({ length: map.map.queries }, (_, row) => row);
  const columns = keys ?? Array.from({ length: map.map.keys }, (_, column) => column);
  let [sum, exists] = [0, false];
  for (const row of rows) {
    const all = columns.map((column) => value(row, column)).filter((one) => !Number.isNaN(one));
    exists ||= all.length > 0;
    sum += keys ? all.reduce((total, one) => total + one, 0) : Math.max(0, ...all);
  }
  return exists ? sum / rows.length : NaN;
}

export function keptValues(map: SyntheticMap, query: URLSearchParams): Float32Array {
  const [queries, keys] = [indices(query.get("queries")), indices(query.get("keys"))];
  const by = query.get("by") as Measure;
  return Float32Array.from({ length: map.map.heads }, (_, head) => keptOfHead(map, head, queries, keys, by));
}

/** As the server ranks changes; texts of different lengths are refused. */
export function changes(atlas: SyntheticAtlas, before: SyntheticAtlas, query: URLSearchParams): { heads: HeadValue[] } {
  const [queries, keys] = [indices(query.get("queries")), indices(query.get("keys"))];
  const heads = atlas.maps.flatMap((map, at) => {
    const other = before.maps[at];
    if (other.map.queries !== map.map.queries) throw new Error("changes are told of texts of one length");
    return Array.from({ length: map.map.heads }, (_, head): HeadValue => {
      const now = keptOfHead(map, head, queries, keys, "weight");
      return { map: at, head, value: now - keptOfHead(other, head, queries, keys, "weight") };
    });
  });
  return { heads: heads.sort((a, b) => Math.abs(b.value ?? 0) - Math.abs(a.value ?? 0)) };
}
