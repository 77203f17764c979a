/** What the page computes of heads and words is what Python computes: heads.json is written by test_page_cases.py. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { divergences, leafOrder, shares } from "../src/clustering.ts";
import { linked, METHODS, type Pair, scores, wordWeights } from "../src/links.ts";
import cases from "./heads.json";

const close = (found: ArrayLike<number>, expected: number[], within: number) => {
  assert.equal(found.length, expected.length);
  expected.forEach((value, i) => assert.ok(Math.abs((found[i] || 0) - value) < within, `${found[i]} is not ${value}`));
};

test("the order of heads is Python's, of equal distances, too", () => {
  for (const { divergence, order } of cases.orders) {
    assert.deepEqual(leafOrder(Float32Array.from((divergence as number[][]).flat()), divergence.length), order);
  }
});

test("the divergence of heads is Python's, with sinks and empty rows, too", () => {
  for (const { weights, divergence, order } of cases.divergences) {
    const [rows, columns] = [weights[0].length, weights[0][0].length];
    const between = divergences(weights.map((head) => shares(Float32Array.from(head.flat()), rows, columns, () => 1)));
    close(between, divergence.flat(), 1e-5);
    assert.deepEqual(leafOrder(between, weights.length), order);
  }
});

test("weights between words and their links are Python's, by every method", () => {
  for (const found of cases.words) {
    const [rows, columns] = [found.weights.length, found.weights[0].length];
    const numbers = (found.weights as (number | null)[][]).flat().map((weight) => weight ?? NaN);
    const weights = { rows, columns, data: Float32Array.from(numbers) };
    const between = wordWeights(weights, found.target_words, found.source_words);
    close(between.data, found.between.flat(), 1e-5);
    for (const method of METHODS) assert.deepEqual(linked(between, method, cases.threshold), found[method], method);
  }
});

test("the alignment error rate is Python's", () => {
  for (const { links, sure, possible, error_rate } of cases.error_rates) {
    const found = scores(links as Pair[], { sure, possible } as { sure: Pair[]; possible: Pair[] });
    assert.ok(Math.abs(found.errorRate - error_rate) < 1e-6, `${found.errorRate} is not ${error_rate}`);
  }
});
