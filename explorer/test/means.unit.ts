import assert from "node:assert/strict";
import { test } from "node:test";
import { members, withMeans } from "../src/means.ts";
import { DEFAULT } from "../src/state.ts";
import type { Region, Source } from "../src/types.ts";
import { broken, profileOf, short, type SyntheticAtlas, weightsOf } from "./synthetic.ts";

const sourceOf = (atlas: SyntheticAtlas): Source => ({
  meta: async () => atlas.meta,
  tokens: async () => [],
  pooled: async (map, head, level, reduce) => atlas.maps[map].pooled(head, level, reduce),
  weights: async (map, head, region) => weightsOf(atlas.maps[map], head, region),
  profile: async (map, head, which) => profileOf(atlas.maps[map], head, which),
});

test("a mean is that of the weights, in parts, levels and profiles", async () => {
  const atlas = short(2, 3, 67);
  const { source, means } = withMeans(sourceOf(atlas), atlas.meta);
  const heads = members(atlas.meta, { ...DEFAULT, mean: "all" });
  assert.equal(heads.length, 6);
  const head = means.head(0, heads);
  assert.ok(head >= 3 && head === means.head(0, heads));
  assert.deepEqual(means.of(0, head), heads);
  assert.equal(means.of(0, 2), undefined);
  const region: Region = { row0: 31, row1: 53, column0: 2, column1: 37 };
  const found = await source.weights(0, head, region);
  let at = 0;
  for (let row = region.row0; row < region.row1; row += 1) {
    for (let column = region.column0; column < region.column1; column += 1) {
      const exact = heads.reduce((sum, one) => sum + atlas.maps[one.map].weight(one.head, row, column), 0) / 6;
      assert.ok(Number.isNaN(exact) ? Number.isNaN(found[at]) : Math.abs(found[at] - exact) <= 6 * 2 ** -24 * exact + 1e-9, `${row}, ${column}`);
      at += 1;
    }
  }
  const sums = await source.profile(0, head, "received");
  const own = await Promise.all(heads.map((one) => source.profile(one.map, one.head, "received")));
  sums.forEach((sum, key) => assert.ok(Math.abs(sum - own.reduce((total, one) => total + one[key], 0) / 6) < 1e-4));
  const level = await source.pooled(0, head, 0, "mean");
  const parts = await Promise.all(heads.map((one) => source.pooled(one.map, one.head, 0, "mean")));
  level.forEach((value, cell) => {
    const exact = parts.reduce((total, one) => total + one[cell], 0) / 6;
    assert.ok(Number.isNaN(exact) ? Number.isNaN(value) : Math.abs(value - exact) < 1e-6);
  });
  // A head itself is as it was.
  assert.deepEqual(await source.weights(1, 2, region), weightsOf(atlas.maps[1], 2, region));
});

test("a query that attends to NaN in one head does so in the mean", async () => {
  const atlas = broken();
  const { source, means } = withMeans(sourceOf(atlas), atlas.meta);
  const head = means.head(0, members(atlas.meta, { ...DEFAULT, mean: "layer" }));
  const row = (at: number) => source.weights(0, head, { row0: at, row1: at + 1, column0: 0, column1: 20 });
  assert.equal((await row(15))[3], Infinity);
  assert.ok(Number.isNaN((await row(15))[18]));
  assert.ok(Number.isFinite((await row(5))[3]));
});

test("which heads are averaged", () => {
  const { meta } = short(2, 3, 16);
  const state = { ...DEFAULT, pins: [[0, 1], [1, 2]] as [number, number][] };
  const of = (mean: (typeof state)["mean"], map = 1) => members(meta, { ...state, mean, map }).map((one) => `${one.map}.${one.head}`).join(" ");
  assert.equal(of(""), "");
  assert.equal(of("layer"), "1.0 1.1 1.2");
  assert.equal(of("pins"), "0.1 1.2");
  const other = { ...meta, maps: [{ ...meta.maps[0], kind: "cross" as const }, meta.maps[1]] };
  assert.equal(members(other, { ...state, mean: "all", map: 1 }).length, 3, "of its kind");
  const long = { ...meta, maps: [{ ...meta.maps[0], keys: 4096 }] };
  assert.deepEqual(members(long, { ...state, mean: "all" }), []);
});
