import assert from "node:assert/strict";
import { test } from "node:test";
import { EffectStore, ranked } from "../src/effects/effect_store.ts";
import type { EffectLine, EffectRequest, EffectService } from "../src/effects/effect_types.ts";
import { alignmentWords, costWords, durationWords, effectSentence, signed } from "../src/effects/effect_words.ts";
import { Ranking } from "../src/kept_values.ts";

const REQUEST: EffectRequest = { text: "it", token: 1, terms: null, replace: "zero", reference: null };

/** A model whose lines are given. */
function model(lines: (EffectLine | Error)[]): EffectService {
  return {
    kind: "encoder",
    modules: [],
    cost: async () => ({ interventions: 1, seconds: 1, tokens: 2 }),
    async *measure() {
      for (const line of lines) {
        if (line instanceof Error) throw line;
        yield line;
      }
    },
  };
}

const effect = (done: number, value: number | null): EffectLine => ({ done, module: "a", head: done, value, after: {} });
const before = (of: number): EffectLine => ({ before: {}, of, alignment: null });

async function measured(lines: (EffectLine | Error)[]): Promise<EffectStore> {
  const store = new EffectStore();
  store.show(model(lines), "it", "");
  await store.run(REQUEST, "each head alone", "the state");
  return store;
}

test("a run is done only where all of its effects came", async () => {
  const whole = await measured([before(2), effect(1, 0.5), effect(2, null), { ranked: [] }]);
  assert.deepEqual([whole.results[0].state, whole.table?.effects.length], ["done", 2]);
  const cut = await measured([before(2), effect(1, 0.5)]);
  assert.deepEqual([cut.results[0].state, cut.results[0].error, cut.table], ["failed", "the answer ended too early", undefined]);
  const told = await measured([before(2), effect(1, 0.5), { error: "no memory" }]);
  assert.deepEqual([told.results[0].state, told.results[0].error], ["failed", "no memory"]);
  const broken = await measured([new Error("gone")]);
  assert.deepEqual([broken.results[0].state, broken.results[0].error], ["failed", "gone"]);
});

test("what was measured is of its text, and stays while another is shown", async () => {
  const store = await measured([before(1), effect(1, 0.5)]);
  store.show(model([]), "she", "it");
  assert.deepEqual([store.results.length, store.table], [0, undefined]);
  store.show(model([]), "it", "she");
  assert.equal(store.table?.effects[0].value, 0.5);
});

test("no second run while one is on", async () => {
  const store = new EffectStore();
  store.show(model([before(1), effect(1, 1)]), "it", "");
  const first = store.run(REQUEST, "a", "b");
  await store.run(REQUEST, "c", "d");
  await first;
  assert.deepEqual(store.results.map(({ title }) => title), ["a"]);
});

test("effects and changes are ranked by their size, and keep their sign", () => {
  const values = new Map([["0/0", -0.5], ["0/1", 0.25], ["0/2", NaN], ["1/0", 0.5]]);
  const ranking = new Ranking(values, true);
  assert.deepEqual([0, 1, 2].map((head) => ranking.short({ map: 0, head })), ["−0.5000 #1", "+0.2500 #3", ""]);
  assert.equal(ranking.words({ map: 1, head: 0 }), "+0.5000 · 1 of 3");
  assert.equal(ranking.size({ map: 0, head: 0 }), 0.5);
  const sizes = ranked([0.1, -0.4, null].map((value, at) => effect(at, value) as Parameters<typeof ranked>[0][number])).map(({ value }) => value);
  assert.deepEqual(sizes, [-0.4, 0.1, null]);
});

test("costs, signs and alignments in words", () => {
  assert.equal(costWords({ interventions: 1, seconds: 0.004, tokens: 3 }), "Costs 1 run of the model, about 0.01 s.");
  assert.equal(costWords({ interventions: 1152, seconds: 300, tokens: 3 }), "Costs 1,152 runs of the model, about 5 min.");
  assert.deepEqual([0.05, 0.5, 9.6, 89, 91].map(durationWords), ["0.05 s", "0.5 s", "10 s", "89 s", "2 min"]);
  assert.deepEqual([signed(-1.5, "translator"), signed(1.5, "language model"), signed(0.5, "encoder"), signed(null, "encoder")], ["−1.5000", "+1.5000", "0.5000", "NaN"]);
  const sentence = effectSentence("translator", "", { text: "oui" }, { done: 1, module: null, head: null, value: -2, after: { changed: false } });
  assert.equal(sentence, "The translation stays the same. The log-probability of what it said before changes by −2.0000.");
  const pairs: [number, number][] = [[0, 0], [1, 1]];
  const all = alignmentWords({ pairs, missing_before: [], missing_now: [], tokens: { before: [], now: [] } });
  assert.equal(all, "2 tokens of the two texts aligned.");
  const many = Array.from({ length: 9 }, (_, at) => at);
  assert.match(alignmentWords({ pairs, missing_before: [], missing_now: many, tokens: { before: [], now: many.map((at) => `t${at}`) } }), /: 0 “t0”, .*5 “t5”, and 3 more\.$/);
});
