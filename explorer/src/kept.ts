/** What is kept: some queries and some keys; one of each is a pair, one side alone are tokens. */

import type { AttentionMap, Side } from "./types.ts";

export interface Kept {
  readonly query: readonly number[];
  readonly key: readonly number[];
}

export const NOTHING: Kept = { query: [], key: [] };

/** At most so many tokens of each side, since an address has an end. */
export const MOST_KEPT = 32;

export const SIDES: readonly Side[] = ["query", "key"];

export function pair(row: number, column: number): Kept {
  return { query: [row], key: [column] };
}

export function isNothing({ query, key }: Kept): boolean {
  return !query.length && !key.length;
}

/** The one pair that is kept, where it is one. */
export function onePair({ query, key }: Kept): [number, number] | undefined {
  return query.length === 1 && key.length === 1 ? [query[0], key[0]] : undefined;
}

export function sameKept(a: Kept, b: Kept): boolean {
  return a === b || (String(a.query) === String(b.query) && String(a.key) === String(b.key));
}

/** A press on a token keeps it, and a second one lets it go; `several`: beside those of its side, not in their place. */
export function toggled(kept: Kept, side: Side, index: number, several = false): Kept {
  const before = kept[side];
  const without = before.filter((other) => other !== index);
  const gone = without.length < before.length;
  const after = several ? (gone ? without : [...before, index]) : gone && !without.length ? [] : [index];
  return { ...kept, [side]: after.slice(-MOST_KEPT).sort((a, b) => a - b) };
}

/** A press on a cell keeps the pair, and a second one lets it go. */
export function toggledPair(kept: Kept, row: number, column: number): Kept {
  const now = onePair(kept);
  return now && now[0] === row && now[1] === column ? NOTHING : pair(row, column);
}

/** What a map has of it. */
export function keptWithin(kept: Kept, { queries, keys }: AttentionMap): Kept {
  const query = kept.query.filter((index) => index < queries);
  const key = kept.key.filter((index) => index < keys);
  return query.length === kept.query.length && key.length === kept.key.length ? kept : { query, key };
}

/** The sides that another map has of the same texts; a side of another text is let go. */
export function keptIn(kept: Kept, from: AttentionMap, to: AttentionMap): Kept {
  if (from === to) return kept;
  const [sameQueries, sameKeys] = SIDES.map((side) => textOf(from, side) === textOf(to, side));
  return { query: sameQueries ? kept.query : [], key: sameKeys ? kept.key : [] };
}

/** Names the text of one side of a map: equal names, equal tokens. Where the source tells none, equal lengths count. */
function textOf(map: AttentionMap, side: Side): string {
  const [query, key] = map.texts ?? [];
  const text = side === "query" ? query : key;
  return text === undefined ? `length ${side === "query" ? map.queries : map.keys}` : `text ${text}`;
}

/** One side as a server takes it: "7.8"; "-" for all. */
export function sideText(indices: readonly number[]): string {
  return indices.join(".") || "-";
}

/** As in an address: "4,7" a pair, "4," a query, ",7.8" two keys. */
export function keptText(kept: Kept): string {
  return isNothing(kept) ? "" : `${kept.query.join(".")},${kept.key.join(".")}`;
}

export function readKept(text: string): Kept | undefined {
  const found = /^([\d.]*),([\d.]*)$/.exec(text);
  const sides = found?.slice(1).map((side) => (side ? side.split(".").map((part) => (part ? Number(part) : NaN)) : []));
  if (!sides?.every((side) => side.length <= MOST_KEPT && side.every(Number.isSafeInteger))) return undefined;
  const [query, key] = sides.map((side) => [...new Set(side)].sort((a, b) => a - b));
  return { query, key };
}
