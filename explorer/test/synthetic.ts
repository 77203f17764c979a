/** Attention that is computed from formulas, so that any tile and any pooled cell of it is known. */

import type { AttentionMap, Meta, Reduce, Region, Role, Side } from "../src/types.ts";

export interface SyntheticMap {
  map: AttentionMap;
  token(side: Side, index: number): string;
  weight(head: number, row: number, column: number): number;
  pooled(head: number, level: number, reduce: Reduce): Float32Array;
}

export interface SyntheticAtlas {
  meta: Meta;
  maps: SyntheticMap[];
}

const WORDS = "the cat sat on a mat because it was tired , and then she said that he could not see them .".split(" ");

/** A number from 0 to 1 that depends on all of its arguments. */
export function noise(...seeds: number[]): number {
  let state = 0x9e3779b9;
  for (const seed of seeds) {
    state = Math.imul(state ^ seed, 0x85ebca6b);
    state ^= state >>> 13;
    state = Math.imul(state, 0xc2b2ae35);
    state ^= state >>> 16;
  }
  return (state >>> 0) / 2 ** 32;
}

export const word = (index: number): string => WORDS[Math.floor(noise(index, 7) * WORDS.length)];

export function weightsOf(map: SyntheticMap, head: number, region: Region): Float32Array {
  const width = region.column1 - region.column0;
  const result = new Float32Array((region.row1 - region.row0) * width);
  for (let row = region.row0; row < region.row1; row += 1) {
    for (let column = region.column0; column < region.column1; column += 1) {
      result[(row - region.row0) * width + column - region.column0] = map.weight(head, row, column);
    }
  }
  return result;
}

export function profileOf(map: SyntheticMap, head: number, which: string): Float32Array {
  const { queries, keys } = map.map;
  // Long maps get a formula too: the true profile would need 10 ** 10 weights.
  if (queries > 2048) {
    const count = which === "received" ? keys : queries;
    return Float32Array.from({ length: count }, (_, i) => 1 + Math.sin(i / 3000) + noise(i, head));
  }
  const result = new Float32Array(which === "received" ? keys : queries);
  for (let row = 0; row < queries; row += 1) {
    for (let column = 0; column < keys; column += 1) {
      const weight = map.weight(head, row, column);
      if (Number.isNaN(weight)) continue;
      if (which === "received") result[column] += weight;
      else if (which === "largest") result[row] = Math.max(result[row], weight);
      else if (weight > 0) result[row] -= weight * Math.log(weight);
    }
  }
  return result;
}

export function levelsOf(rows: number, columns: number): Pick<AttentionMap, "levels" | "cells"> {
  let cell = Math.max(rows, columns) <= 64 ? 1 : 2;
  while (Math.ceil(Math.max(rows, columns) / cell) > 1024) cell *= 2;
  const levels: [number, number][] = [];
  const cells: [number, number][] = [];
  for (; ; cell *= 2) {
    levels.push([Math.ceil(rows / cell), Math.ceil(columns / cell)]);
    cells.push([cell, cell]);
    if (Math.max(...levels[levels.length - 1]) <= 64) return { levels, cells };
  }
}

type Logit = (row: number, column: number) => number;

const KINDS: { name: string; logit: (head: number) => Logit }[] = [
  { name: "previous token", logit: () => (i, j) => (i - j === 1 ? 5 : 0) },
  { name: "sink", logit: () => (_, j) => (j === 0 ? 7 : 0) },
  { name: "local", logit: () => (i, j) => -(i - j) / 9 },
  { name: "diffuse", logit: () => () => 0 },
  { name: "delimiter", logit: () => (_, j) => (word(j) === "." || word(j) === "," ? 4 : 0) },
  { name: "self", logit: () => (i, j) => (i === j ? 5 : 0) },
  { name: "fixed offset", logit: (head) => (i, j) => 5 - Math.abs(i - j - 4 - head) },
  { name: "duplicate token", logit: () => (i, j) => (word(i) === word(j) ? 4 : 0) },
];

/** Softmax rows, causal; `layers` maps of `heads` heads each over `length` tokens. */
export function short(layers: number, heads: number, length: number): SyntheticAtlas {
  const maps = Array.from({ length: layers }, (_, layer) => dense(`transformer.h.${layer}.attn`, layer, heads, length));
  return {
    meta: {
      version: 1,
      title: `synthetic, ${layers} × ${heads} heads, ${length} tokens`,
      overview: layers > 2,
      profiles: ["entropy", "received", "largest"],
      maps: maps.map(({ map }) => map),
    },
    maps,
  };
}

function dense(name: string, layer: number, heads: number, length: number): SyntheticMap {
  const kindOf = (head: number) => KINDS[(5 * layer + head) % KINDS.length];
  const kept = new Map<number, Float32Array>();
  const all = (head: number): Float32Array => {
    let weights = kept.get(head);
    if (!weights) {
      weights = causal(kindOf(head).logit(head), length, layer * 100 + head);
      kept.set(head, weights);
      if (kept.size > 12) kept.delete(kept.keys().next().value as number);
    }
    return weights;
  };
  const role = (head: number): Role => ({
    name: kindOf(head).name,
    score: 0.5 + noise(layer, head) / 2,
    n: length - 1,
    rule: `mean weight of a ${kindOf(head).name} head, at least 0.5`,
  });
  const map: AttentionMap = {
    name,
    call: 0,
    sequence: 0,
    kind: "self",
    heads,
    queries: length,
    keys: length,
    ...levelsOf(length, length),
    metrics: {
      entropy: Array.from({ length: heads }, (_, head) => 4 * noise(layer, head, 1)),
      distance: Array.from({ length: heads }, (_, head) => 100 * noise(layer, head, 2)),
      sink: Array.from(
        { length: heads },
        (_, head) => (kindOf(head).name === "sink" ? 0.9 : 0.1) * noise(layer, head, 3),
      ),
      top1: Array.from({ length: heads }, (_, head) => noise(layer, head, 4)),
    },
    roles: Array.from({ length: heads }, (_, head) => (noise(layer, head, 5) < 0.7 ? [role(head)] : [])),
  };
  const weight = (head: number, row: number, column: number) => all(head)[row * length + column];
  return { map, token: (_, index) => word(index), weight, pooled: pooling(map, weight) };
}

function causal(logit: Logit, length: number, seed: number): Float32Array {
  const weights = new Float32Array(length * length).fill(NaN);
  for (let row = 0; row < length; row += 1) {
    let sum = 0;
    for (let column = 0; column <= row; column += 1) {
      const value = Math.exp(logit(row, column) + noise(seed, row, column));
      weights[row * length + column] = value;
      sum += value;
    }
    for (let column = 0; column <= row; column += 1) weights[row * length + column] /= sum;
  }
  return weights;
}

/** Pooled from all weights, and kept. */
export function pooling(map: AttentionMap, weight: SyntheticMap["weight"]): SyntheticMap["pooled"] {
  const kept = new Map<string, Float32Array>();
  return (head, level, reduce) => {
    const key = `${head} ${level} ${reduce}`;
    let result = kept.get(key);
    if (result) return result;
    const [rows, columns] = map.levels[level];
    const [down, across] = map.cells[level];
    result = new Float32Array(rows * columns).fill(NaN);
    const counts = new Uint32Array(rows * columns);
    for (let i = 0; i < map.queries; i += 1) {
      for (let j = 0; j < map.keys; j += 1) {
        const value = weight(head, i, j);
        const cell = Math.floor(i / down) * columns + Math.floor(j / across);
        counts[cell] += 1;
        if (Number.isNaN(value)) continue;
        if (Number.isNaN(result[cell])) result[cell] = 0;
        result[cell] = reduce === "max" ? Math.max(result[cell], value) : result[cell] + value;
      }
    }
    if (reduce === "mean") for (let i = 0; i < result.length; i += 1) result[i] /= counts[i];
    kept.set(key, result);
    return result;
  };
}

/** The greatest of a sink, a local band, some columns and stripes: its maximum over any block has a closed form. */
export function long(length: number): SyntheticAtlas {
  const stripe = (distance: number) => (distance >= 25_000 ? 0.3 * Math.max(0, 1 - (distance % 25_000) / 300) : 0);
  const local = (distance: number, head: number) => 0.5 * Math.exp(-distance / (head ? 2000 : 200));
  const weight = (head: number, i: number, j: number) => {
    if (j > i) return NaN;
    const column = j === 0 ? 0.6 : j % 7000 === 0 ? 0.15 : 0;
    const fine = 0.02 * noise(Math.floor(i / 3), Math.floor(j / 3), head);
    return Math.max(column, local(i - j, head), stripe(i - j), fine);
  };
  const map: AttentionMap = {
    name: "long.0.attention",
    call: 0,
    sequence: 0,
    kind: "self",
    heads: 2,
    queries: length,
    keys: length,
    ...levelsOf(length, length),
    metrics: { entropy: [3.2, 5.1] },
    roles: [],
  };
  const pooled = (head: number, level: number, reduce: Reduce): Float32Array => {
    const [rows, columns] = map.levels[level];
    const cell = map.cells[level][0];
    const result = new Float32Array(rows * columns).fill(NaN);
    for (let r = 0; r < rows; r += 1) {
      for (let c = 0; c < columns && c <= r; c += 1) {
        const least = Math.max(0, (r - c) * cell - cell + 1);
        const most = (r - c) * cell + cell - 1;
        const column = c === 0 ? 0.6 : Math.ceil((c * cell) / 7000) * 7000 < (c + 1) * cell ? 0.15 : 0;
        const passes = most >= 25_000 && Math.floor(most / 25_000) > Math.floor((least - 1) / 25_000);
        const value = Math.max(column, local(least, head), passes ? 0.3 : stripe(least), 0.02);
        // The mean is only made to look right: nothing is tested by it.
        result[r * columns + c] = reduce === "max" ? value : (value * 3) / cell + 0.01;
      }
    }
    return result;
  };
  return {
    meta: { version: 1, title: "one head of 100,000 tokens", maps: [map] },
    maps: [{ map, token: (_, index) => word(index), weight, pooled }],
  };
}

/** Translation: more or less along the diagonal, no mask. */
export function cross(): SyntheticAtlas {
  const target = "das ist ein kleines Haus mit einem roten Dach , das am Rande der Stadt steht .".split(" ");
  const source = "this is a small house with a red roof that stands at the edge of town .".split(" ");
  const raw = (head: number, i: number, j: number) =>
    Math.exp(-Math.abs(i * (source.length / target.length) - j) * (1 + head) + noise(head, i, j));
  const weight = (head: number, i: number, j: number) =>
    raw(head, i, j) / source.reduce((sum, _, k) => sum + raw(head, i, k), 0);
  const map: AttentionMap = {
    name: "decoder.0.cross",
    call: 0,
    sequence: 0,
    kind: "cross",
    heads: 4,
    queries: target.length,
    keys: source.length,
    ...levelsOf(target.length, source.length),
    metrics: { entropy: [1.9, 1.2, 0.9, 0.7] },
    roles: [],
  };
  const maps = [
    {
      map,
      token: (side: Side, index: number) => (side === "query" ? target : source)[index],
      weight,
      pooled: pooling(map, weight),
    },
  ];
  return { meta: { version: 1, title: "a translation", maps: [map] }, maps };
}

export const HOSTILE = [
  "<img src=x onerror=window.harmed=1>",
  "<script>window.harmed=1</script>",
  "\u202egnp.exe",
  "a\u0000b\u0007\n\t",
  "long".repeat(300_000),
  "\u200b\ufeff",
  '"><svg onload=window.harmed=1>',
  "javascript:window.harmed=1",
  "=1+1",
  "👩‍👩‍👧",
  "\ud800",
  "مرحبا",
  "日本語",
  " ",
  "",
  "&lt;b&gt;",
];

/** Tokens that try to be more than text. */
export function hostile(): SyntheticAtlas {
  const atlas = short(1, 2, HOSTILE.length);
  atlas.meta.title = "<b>hostile</b>\u202e title";
  atlas.meta.maps[0].name = "<i>evil</i>.layer.0";
  atlas.meta.maps[0].roles[0] = [{ name: "<u>role</u>", score: 1, n: 1, rule: "<script>window.harmed=1</script>" }];
  return { ...atlas, maps: atlas.maps.map((map) => ({ ...map, token: (_: Side, index: number) => HOSTILE[index] })) };
}

/** One head as it should be, and one whose queries from 12 on attend to NaN. */
export function broken(): SyntheticAtlas {
  const atlas = short(1, 2, 20);
  const [one] = atlas.maps;
  const map: AttentionMap = { ...one.map, broken: [0, 8], metrics: { entropy: [1.5, null] } };
  const weight = (head: number, row: number, column: number) => {
    const value = one.weight(head, row, column);
    return head === 1 && row >= 12 && !Number.isNaN(value) ? Infinity : value;
  };
  return { meta: { ...atlas.meta, maps: [map] }, maps: [{ ...one, map, weight, pooled: pooling(map, weight) }] };
}

/** Words between [CLS] and [SEP]: half of the weight of a query lies on these. */
export function special(): SyntheticAtlas {
  const tokens = ["[CLS]", "un", "##seen", "cats", "sleep", "[SEP]"];
  const count = tokens.length;
  const weight = (_: number, row: number, column: number) =>
    column === 0 || column === count - 1 ? 0.25 : row === column ? 0.5 : row === 0 || row === count - 1 ? 0.125 : 0;
  const words = [-1, 0, 0, 1, 2, -1];
  const map: AttentionMap = {
    ...short(1, 1, count).maps[0].map,
    words: [words, words],
  };
  const maps = [{ map, token: (_: Side, index: number) => tokens[index], weight, pooled: pooling(map, weight) }];
  return { meta: { version: 1, title: "special tokens", maps: [map] }, maps };
}
