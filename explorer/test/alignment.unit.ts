import assert from "node:assert/strict";
import { test } from "node:test";
import { linked, METHODS, scores, type Weights, wordWeights } from "../src/links.ts";
import { goldMarks, matched } from "../src/matching.ts";
import type { AttentionMap, Gold } from "../src/types.ts";
import { translation } from "./translation.ts";

const weights = (rows: number[][]): Weights => ({
  rows: rows.length,
  columns: rows[0].length,
  data: Float32Array.from(rows.flat()),
});

const CASE = weights([
  [0.5, 0.25, 0.125, 0.125],
  [0.125, 0.25, 0.5, 0.125],
  [0.0, 0.375, 0.125, 0.5],
]);
const [QUERY_WORDS, KEY_WORDS] = [
  [0, 0, 1],
  [0, 1, 1, -1],
];
const GOLD: Gold = {
  sure: [
    [0, 0],
    [1, 1],
  ],
  possible: [[0, 1]],
};

test("what is sure is possible too, and nothing is divided by nothing", () => {
  const gold: Gold = { sure: [[0, 0]], possible: [[1, 1]] };
  assert.equal(scores([[0, 0]], gold).errorRate, 0);
  assert.equal(
    scores(
      [
        [0, 0],
        [1, 1],
      ],
      gold,
    ).errorRate,
    0,
  );
  assert.equal(scores([[0, 1]], gold).errorRate, 1);
  const none = scores([], { sure: [], possible: [] });
  assert.ok([none.errorRate, none.precision, none.recall].every(Number.isNaN));
});

test("links of equals, of no weight and of no pair", () => {
  assert.deepEqual(linked(weights([[0, 0.5, 0.5]]), "argmax", 0), [[1, 0]]);
  assert.deepEqual(
    linked(
      weights([
        [0, 0],
        [NaN, 1],
      ]),
      "argmax",
      0,
    ),
    [[1, 1]],
  );
  for (const method of METHODS) assert.deepEqual(linked(weights([[NaN, NaN]]), method, 0), []);
});

test("words without tokens, and pairs of words that do not exist", () => {
  const between = wordWeights(
    weights([
      [1, NaN],
      [0.5, 0.5],
    ]),
    [0, 2],
    [0, 1],
  );
  assert.deepEqual([...between.data], [1, NaN, NaN, NaN, 0.5, 0.5]);
  assert.deepEqual([...wordWeights(weights([[1]]), [-1], [0]).data], []);
});

test("gold links lie on the tokens of their words", () => {
  const { map } = translation().maps[1];
  const marks = goldMarks(map);
  assert.deepEqual(
    marks.filter(({ sure }) => sure).find(({ row0 }) => row0 === 3),
    { row0: 3, row1: 5, column0: 3, column1: 5, sure: true },
  );
  assert.deepEqual(
    marks.filter(({ sure }) => !sure).map(({ column0 }) => column0),
    [6, 6],
  );
  assert.deepEqual(goldMarks({ ...map, gold: undefined }), []);
});

test("marks of tokens are right or wrong by their words, scores are between words", () => {
  const map = { queries: 3, keys: 4, words: [QUERY_WORDS, KEY_WORDS], gold: GOLD } as unknown as AttentionMap;
  const found = matched(CASE, map, "argmax", { least: 0, gold: true });
  assert.deepEqual(
    found.marks.map(({ row, column, sign }) => [row, column, sign]),
    [
      [0, 0, "right"],
      [1, 2, "wrong"],
      [2, 3, "outside"],
    ],
  );
  assert.equal(found.scores?.errorRate, 0.5);
  const without = matched(CASE, { ...map, gold: undefined }, "argmax", { least: 0, gold: true });
  assert.equal(without.scores, undefined);
  assert.ok(without.marks.every(({ sign }) => sign === "link"));
  assert.ok(matched(CASE, map, "argmax", { least: 0, gold: false }).marks.every(({ sign }) => sign === "link"));
});

