import assert from "node:assert/strict";
import { test } from "node:test";
import { contributionFault, contributions, MOST_PAIRS, scaled } from "../src/contributions.ts";
import type { Meta, Source } from "../src/types.ts";
import { byWords } from "../src/words.ts";
import { contribution, norms, pooledContributions, withNorms } from "./measures.ts";
import { profileOf, short, weightsOf } from "./synthetic.ts";

const atlas = withNorms(short(2, 4, 67));

function source(): Source {
  const { maps, meta } = atlas;
  return {
    meta: async () => meta,
    tokens: async () => [],
    pooled: async (map, head, level, reduce) => maps[map].pooled(head, level, reduce),
    weights: async (map, head, region) => weightsOf(maps[map], head, region),
    profile: async (map, head, which) => profileOf(maps[map], head, which),
    norms: async (map, head) => norms(maps[map], head),
    pooledContributions: async (map, head, level, reduce) => pooledContributions(maps[map], head, level, reduce),
  };
}

test("weights times norms, in any region", async () => {
  const made = contributions(source(), atlas.meta);
  const region = { row0: 11, row1: 48, column0: 5, column1: 58 };
  const found = await made.source.weights(1, 3, region);
  found.forEach((value, at) => {
    const [row, column] = [11 + Math.floor(at / 53), 5 + (at % 53)];
    const expected = contribution(atlas.maps[1], 3, row, column);
    if (Number.isNaN(expected)) assert.ok(Number.isNaN(value));
    else assert.ok(Math.abs(value - expected) <= 2 ** -23 * Math.abs(expected), `${row}, ${column}: ${value}`);
  });
  const received = await made.source.profile(1, 3, "received");
  const sums = profileOf(atlas.maps[1], 3, "received");
  received.forEach((value, key) => assert.ok(Math.abs(value - sums[key] * norms(atlas.maps[1], 3)[key]) <= 1e-6 * value));
  await assert.rejects(async () => made.source.profile(1, 3, "entropy"), /no entropy of contributions/);
  assert.deepEqual([made.meta.quantity, made.meta.exact, made.meta.overview], ["contribution", "exact contributions", false]);
});

test("those of words are the sum over the tokens of a key and the mean over those of a query", async () => {
  const numbers = Array.from({ length: 67 }, (_, at) => Math.floor(at / 2));
  const meta: Meta = { ...atlas.meta, maps: atlas.meta.maps.map((map) => ({ ...map, words: [numbers, numbers] as const })) };
  const made = contributions(source(), meta);
  const { source: merged } = byWords(made.source, made.meta);
  const [value] = await merged.weights(0, 1, { row0: 20, row1: 21, column0: 7, column1: 8 });
  const one = (row: number, column: number) => contribution(atlas.maps[0], 1, row, column);
  const expected = (one(40, 14) + one(40, 15) + one(41, 14) + one(41, 15)) / 2;
  assert.ok(expected > 0 && Math.abs(value - expected) <= 1e-6 * expected, `${value}, ${expected}`);
});

test("no pair and NaN stay, also where a value has no length", () => {
  assert.deepEqual([...scaled(Float32Array.of(NaN, Infinity, 0.5, 0.25), Float32Array.of(0, 0, 2, 0))], [NaN, Infinity, 1, 0]);
});

test("why there are none", () => {
  const { meta } = atlas;
  const without = (count: number): Meta => ({ ...meta, maps: meta.maps.map((map, at) => (at < count ? { ...map, norms: undefined } : map)) });
  assert.equal(contributionFault(source(), meta), "");
  assert.match(contributionFault(source(), without(2)), /^no norms of values are in this record/);
  assert.match(contributionFault(source(), without(1)), /^no norms of values are known of 1 of the 2 layers/);
  assert.match(contributionFault({ ...source(), norms: undefined }, meta), /^no norms of values are in this page/);
  const long = { ...meta, maps: meta.maps.map((map) => ({ ...map, queries: MOST_PAIRS, keys: 2 })) };
  assert.match(contributionFault(source(), long), /would take minutes/);
});
