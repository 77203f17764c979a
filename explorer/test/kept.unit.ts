import assert from "node:assert/strict";
import { test } from "node:test";
import { keptIn, keptText, keptWithin, MOST_KEPT, NOTHING, pair, readKept, toggled, toggledPair } from "../src/kept.ts";
import { Ranking } from "../src/kept_values.ts";
import { keptByWords, sameWord } from "../src/kept_words.ts";
import { short } from "./synthetic.ts";

test("a press keeps a token, a second one lets it go, and several stand beside each other", () => {
  let kept = toggled(NOTHING, "query", 4);
  assert.deepEqual(kept, { query: [4], key: [] });
  kept = toggled(kept, "key", 2);
  assert.deepEqual(kept, pair(4, 2));
  assert.deepEqual(toggled(kept, "query", 5), pair(5, 2), "in the place of the one before");
  kept = toggled(kept, "query", 1, true);
  assert.deepEqual(kept, { query: [1, 4], key: [2] });
  assert.deepEqual(toggled(kept, "query", 4, true), pair(1, 2));
  assert.deepEqual(toggled(kept, "query", 4), pair(4, 2), "one alone of several");
  assert.deepEqual(toggled(pair(4, 2), "query", 4), { query: [], key: [2] });
  assert.equal(toggledPair(pair(4, 2), 4, 2), NOTHING);
  assert.deepEqual(toggledPair(kept, 4, 2), pair(4, 2));
  for (let index = 0; index < 99; index += 1) kept = toggled(kept, "key", index, true);
  assert.equal(kept.key.length, MOST_KEPT);
});

test("an address holds it", () => {
  for (const kept of [NOTHING, pair(3, 0), { query: [7], key: [] }, { query: [], key: [2, 5] }])
    assert.deepEqual(readKept(keptText(kept)) ?? NOTHING, kept);
  assert.deepEqual(readKept("9.2.9,"), { query: [2, 9], key: [] });
  for (const text of ["", "1", "1,2,3", "a,b", "1..2,", "-1,2", "1.,2", `,${"1.".repeat(MOST_KEPT)}1`])
    assert.equal(readKept(text), undefined, text);
});

test("another map has what is of its texts", () => {
  const [map] = short(1, 1, 8).meta.maps;
  assert.deepEqual(keptIn(pair(1, 2), map, { ...map, name: "other" }), pair(1, 2));
  assert.deepEqual(keptIn(pair(1, 2), map, { ...map, queries: 9 }), { query: [], key: [2] });
  const source = { ...map, texts: [0, 0] as [number, number] };
  const cross = { ...map, texts: [1, 0] as [number, number] };
  assert.deepEqual(keptIn(pair(1, 2), cross, source), { query: [], key: [2] }, "as long, and another text");
  assert.deepEqual(keptWithin(pair(7, 8), map), { query: [7], key: [] });
});

test("an edited text has it by its words", () => {
  const words = (text: string) => text.split(" ");
  const before = words("the cat saw the dog and it ran");
  const find = (text: string, index: number) => sameWord(before, words(text), index);
  assert.equal(find("the cat saw the dog and it slept", 6), 6, "before what was edited");
  assert.equal(find("yesterday the cat saw the dog and it ran", 6), 7, "behind it");
  assert.equal(find("the old cat and it saw the dog", 6), 4, "inside of it");
  assert.equal(find("it saw the cat", 7), undefined, "gone");
  assert.equal(find("a dog saw the cat", 3), 3, "the second of two, of which one is left");
  const texts = { query: before, key: before };
  const after = { query: words("the dog and it ran"), key: undefined };
  assert.deepEqual(keptByWords({ query: [4, 6], key: [1] }, texts, after), { query: [1, 3], key: [] });
});

test("heads are ranked by their values, equal ones alike, and those without one are not", () => {
  const ranking = new Ranking(new Map([["0/0", 0.5], ["0/1", NaN], ["0/2", 0.5], ["1/0", 0.25], ["1/1", Infinity], ["1/2", 0.75]]));
  const words = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [9, 9]].map(([map, head]) => ranking.words({ map, head }));
  assert.deepEqual(words, ["0.5000 · 2 of 4", "", "0.5000 · 2 of 4", "0.2500 · 4 of 4", "NaN", "0.7500 · 1 of 4", ""]);
});
