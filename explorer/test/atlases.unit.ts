import assert from "node:assert/strict";
import { test } from "node:test";
import { NOTHING, pair } from "../src/kept.ts";
import { among, atlasKey, carried, compared, labels, neighbour, sameHead, sameMap } from "../src/atlases.ts";
import { shortLabels } from "../src/collection_bar.ts";
import { decode, DEFAULT, encode, showsOneHead, type State } from "../src/state.ts";
import { type AttentionMap, checkedMeta, type Meta, type Collection } from "../src/types.ts";

function meta(...maps: (Partial<AttentionMap> & { name: string })[]): Meta {
  const whole = maps.map((map) => ({ call: 0, sequence: 0, kind: "self", heads: 4, queries: 9, keys: 9, ...map }));
  return checkedMeta({ version: 1, title: "t", maps: whole });
}

test("atlases are called by names that differ", () => {
  assert.deepEqual(labels(["step 0", "step 9"]), ["step 0", "step 9"]);
  assert.deepEqual(labels(["a", "b", "a", " "]), ["a (1)", "b", "a (3)", "atlas"]);
  const cut = `${"x".repeat(39)}…`;
  assert.deepEqual(labels(["x".repeat(80), `${"x".repeat(80)}y`]), [`${cut} (1)`, `${cut} (2)`]);
  const collection = (...names: string[]) => ({ atlases: names.map((name) => ({ name, source: {} })) }) as unknown as Collection;
  assert.deepEqual(shortLabels(collection("alone")), [""]);
  assert.deepEqual(shortLabels({ ...collection("a b", "a"), rerun: () => Promise.reject(new Error()) }), ["now", "before"]);
});

test("a map is found again by its module, call, sequence and translation", () => {
  const of = (rank: number) => ({ hypothesis: { rank, text: "", score: 0 } });
  const from = meta({ name: "a" }, { name: "b" }, { name: "b", call: 1 }, { name: "c", ...of(1) }, { name: "gone" });
  const to = meta({ name: "b", call: 1 }, { name: "b" }, { name: "c", ...of(0) }, { name: "c", ...of(1) });
  assert.deepEqual([1, 2, 3].map((map) => sameMap(from, map, to)), [1, 0, 3]);
  assert.equal(sameMap(from, 0, to), 0);
  assert.equal(sameMap(from, 4, to), 3, "one that is not there: the last place there is");
  assert.deepEqual(sameHead(from, [1, 3], meta({ name: "b", heads: 2 })), [0, 1]);
});

test("a state goes along to another atlas, its place only where that has the same size", () => {
  const from = meta({ name: "a" }, { name: "b" });
  const state: State = { ...DEFAULT, map: 1, head: 3, at: pair(2, 3), window: [4, 4], pins: [[0, 1], [1, 3], [1, 2]] };
  const same = carried(state, from, meta({ name: "b" }, { name: "a" }));
  assert.deepEqual(same, { ...state, map: 0, pins: [[1, 1], [0, 3], [0, 2]] });
  const other = carried(state, from, meta({ name: "b", queries: 7, keys: 7, heads: 2 }));
  assert.deepEqual([other.map, other.head, other.at, other.window], [0, 1, NOTHING, [0, 0]]);
  assert.deepEqual(other.pins, [[0, 1]], "pins that are one now stand there once");
});

test("which atlas is compared with", () => {
  assert.deepEqual([neighbour(1, 0), neighbour(2, 0), neighbour(2, 1), neighbour(5, 4)], [undefined, 1, 0, 3]);
  assert.deepEqual(among({ ...DEFAULT, atlas: 9, against: 3 }, 3), { ...DEFAULT, atlas: 2 });
  assert.equal(among({ ...DEFAULT, atlas: 1, against: 2 }, 3).against, 2);
});

test("keys lead from atlas to atlas", () => {
  const at = { ...DEFAULT, atlas: 1 };
  assert.deepEqual([atlasKey(",", at, 3), atlasKey(".", at, 2)], [{ atlas: 0 }, { atlas: 1 }]);
  assert.deepEqual(atlasKey("b", at, 3), { against: 0, view: "compare", difference: true });
  assert.equal(atlasKey(",", DEFAULT, 1), undefined);
  assert.equal(atlasKey("x", at, 3), undefined);
  assert.deepEqual(compared(undefined), { against: undefined });
});

test("a permalink keeps both atlases", () => {
  const state: State = { ...DEFAULT, view: "compare", atlas: 3, against: 0, difference: true };
  assert.equal(encode(state), "view=compare&atlas=3&against=0&difference=1");
  assert.deepEqual(decode(encode(state)), state);
  assert.deepEqual(decode("atlas=-1&against=x"), DEFAULT);
  assert.ok(showsOneHead(state) && !showsOneHead({ ...state, against: undefined }));
});
