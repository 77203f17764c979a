import assert from "node:assert/strict";
import { test } from "node:test";
import { counterpart, differences, hypothesesOf, mapsOf, neighbour } from "../src/hypotheses.ts";
import { keyChange } from "../src/keyboard.ts";
import { DEFAULT, ofHypothesis, within } from "../src/state.ts";
import { abbreviated } from "../src/text.ts";
import { checkedMeta, type Meta, type Source } from "../src/types.ts";
import { NOTHING, pair } from "../src/kept.ts";
import { byWords, hasWords, otherKept, spelled } from "../src/words.ts";
import { profileOf, short, weightsOf } from "./synthetic.ts";
import { translation } from "./translation.ts";

test("translations of a beam and their maps", () => {
  const { meta } = translation();
  assert.deepEqual(
    hypothesesOf(meta).map(({ rank, score }) => [rank, score]),
    [
      [0, -0.4],
      [1, -1.1],
      [2, -1.6],
    ],
  );
  assert.deepEqual(mapsOf(meta, 1), [0, 2, 5]);
  assert.equal(counterpart(meta, 4, 2), 6);
  assert.equal(counterpart(meta, 0, 2), 0);
  assert.deepEqual([neighbour(meta, 2, 1), neighbour(meta, 0, -1)], [0, 2]);
  assert.equal(neighbour(short(1, 2, 8).meta, 0, 1), 0);
});

test("a map that is of a translation says which is shown", () => {
  const { meta } = translation();
  assert.equal(within({ ...DEFAULT, map: 5 }, meta).hypothesis, 1);
  assert.equal(within({ ...DEFAULT, map: 0, hypothesis: 2 }, meta).hypothesis, 2);
  assert.equal(within({ ...DEFAULT, map: 0, hypothesis: 9 }, meta).hypothesis, 0);
  assert.deepEqual(ofHypothesis({ ...DEFAULT, map: 4 }, meta, 1), { hypothesis: 1, map: 5 });
});

test("keys for translations, words, gold and alignments", () => {
  const { meta } = translation();
  const state = { ...DEFAULT, view: "head" as const, map: 4 };
  assert.deepEqual(keyChange("]", state, meta), { hypothesis: 1, map: 5 });
  assert.deepEqual(keyChange("[", state, meta), { hypothesis: 2, map: 6 });
  assert.deepEqual(keyChange("w", state, meta), { words: true });
  assert.equal(keyChange("w", { ...state, map: 0 }, short(1, 2, 8).meta), undefined);
  assert.deepEqual(keyChange("o", state, meta), { gold: false });
  assert.deepEqual(keyChange("a", state, meta), { alignment: "argmax" });
  assert.deepEqual(keyChange("a", { ...state, alignment: "threshold" }, meta), { alignment: "" });
  // Layers of other translations are stepped over.
  assert.deepEqual(keyChange("ArrowUp", state, meta), { map: 1, head: 0 });
});

test("where two translations differ", () => {
  const told = (other: string, text: string) => differences(other, text).map(({ words, kind }) => `${kind}:${words}`);
  assert.deepEqual(told("le chat noir dort sur la chaise", "le chat dort dans la chaise noire"), [
    "same:le chat",
    "gone:noir",
    "same:dort",
    "gone:sur",
    "new:dans",
    "same:la chaise",
    "new:noire",
  ]);
  assert.deepEqual(told("a b", "a b"), ["same:a b"]);
  assert.deepEqual(told("a", ""), ["gone:a"]);
  const long = "x ".repeat(500);
  assert.deepEqual(differences("y", long), [{ words: long, kind: "same" }]);
});

test("names of few letters", () => {
  assert.equal(abbreviated("decoder.blocks.0.cross_attention"), "dec.0.cro");
  assert.equal(abbreviated("h.11"), "h.11");
  assert.equal(abbreviated("attention"), "attention");
});

test("pieces spell their word", () => {
  assert.equal(spelled(["▁chair", "."]), "chair.");
  assert.equal(spelled(["un", "##seen"]), "unseen");
  assert.equal(spelled(["Ġcat"]), "cat");
  assert.equal(spelled(["▁"]), "▁");
});

function sourceOf(atlas = translation()): { source: Source; meta: Meta } {
  const source: Source = {
    meta: async () => atlas.meta,
    tokens: async (map, side, start, stop) =>
      Array.from({ length: stop - start }, (_, i) => atlas.maps[map].token(side, start + i)),
    pooled: async (map, head, level, reduce) => atlas.maps[map].pooled(head, level, reduce),
    weights: async (map, head, region) => weightsOf(atlas.maps[map], head, region),
    profile: async (map, head, which) => profileOf(atlas.maps[map], head, which),
  };
  return { source, meta: atlas.meta };
}

test("a source by words: rows are means, columns are sums", async () => {
  const { source, meta } = sourceOf();
  const merged = byWords(source, meta);
  const map = merged.meta.maps[1];
  assert.deepEqual([map.queries, map.keys, map.levels, hasWords(merged.meta)], [7, 7, [[7, 7]], false]);
  assert.deepEqual(await merged.source.tokens(1, "query", 3, 7), ["dort", "sur", "la", "chaise."]);
  assert.deepEqual(await merged.source.tokens(1, "key", 3, 4), ["sleeps"]);
  const { weight } = translation().maps[1];
  const region = { row0: 3, row1: 4, column0: 3, column1: 4 };
  const [told] = await merged.source.weights(1, 2, region);
  const expected = [3, 4].flatMap((i) => [3, 4].map((j) => weight(2, i, j))).reduce((a, b) => a + b, 0) / 2;
  assert.ok(Math.abs(told - expected) < 1e-6);
  const whole = await merged.source.pooled(1, 2, 0, "max");
  assert.equal(whole[3 * 7 + 3], told);
  const received = await merged.source.profile(1, 2, "received");
  let sum = 0;
  for (let row = 0; row < 7; row += 1) sum += whole[row * 7 + 3];
  assert.ok(Math.abs(received[3] - sum) < 1e-6);
  const entropy = await merged.source.profile(1, 2, "entropy");
  const row = whole.subarray(0, 7).reduce((all, value) => all - value * Math.log(value), 0);
  assert.ok(Math.abs(entropy[0] - row) < 1e-5);
  assert.equal((await merged.source.profile(1, 2, "largest"))[0], Math.max(...whole.subarray(0, 7)));
});

test("maps without words, or of which not all weights are there, stay as they are", async () => {
  const { source, meta } = sourceOf(short(1, 2, 8));
  const merged = byWords(source, meta);
  assert.equal(merged.meta.maps[0], meta.maps[0]);
  assert.equal((await merged.source.tokens(0, "key", 0, 8)).length, 8);
  const own = sourceOf();
  const part = byWords({ ...own.source, offers: (map, head, level) => map + head > 1 || level >= 0 }, own.meta);
  assert.deepEqual(
    part.meta.maps.map((map) => map.queries),
    [9, 10, 7, 4, 7, 7, 4],
  );
});

test("what is kept goes along from tokens to words and back, with all tokens of a word", () => {
  const [, map] = translation().meta.maps;
  assert.deepEqual(otherKept(map, pair(4, 4), true), pair(3, 3));
  assert.deepEqual(otherKept(map, pair(9, 0), true), { query: [], key: [0] }, "a token of no word is let go");
  const [words] = map.words ?? [];
  const tokens = (word: number) => [...(words ?? []).keys()].filter((token) => words?.[token] === word);
  assert.deepEqual(otherKept(map, { query: [3], key: [] }, false), { query: tokens(3), key: [] });
  assert.ok(tokens(3).length > 1);
  assert.equal(otherKept({ ...map, words: undefined }, NOTHING, true), NOTHING);
});

test("lists of words are found in the meta data, and dropped where they do not fit", () => {
  const map = (words: unknown) => ({ ...short(1, 1, 2).meta.maps[0], words });
  const meta = { version: 1, title: "", words: [[0, 0], [0]], maps: [[0, null], [0, 1], [7, null]].map(map) };
  const found = checkedMeta(meta as unknown as Meta).maps.map(({ words }) => words);
  assert.deepEqual(found, [[[0, 0], null], undefined, undefined]);
  assert.deepEqual(checkedMeta(meta).maps[0].words, [[0, 0], null]);
});
