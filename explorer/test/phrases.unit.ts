import assert from "node:assert/strict";
import { test } from "node:test";
import { phraseMatches } from "../src/phrases.ts";

const spans = (tokens: string[], wanted: string, start = 0, known = 0) =>
  phraseMatches(tokens, wanted, start, known).map(({ first, last }) => `${first}-${last}`);

test("a phrase is found across tokens, whatever its tokenizer and the case of its letters", () => {
  assert.deepEqual(spans(["▁The", "▁Uni", "ted", "▁States", "."], "united states"), ["1-3"]);
  assert.deepEqual(spans(["The", "ĠUnited", "ĠStates", "."], "United  States."), ["1-3"]);
  assert.deepEqual(spans(["the", "un", "##ited", "states", "."], "UNITED STATES"), ["1-3"]);
  assert.deepEqual(spans(["고양이", "가", "▁매트", "▁위에"], "매트 위"), ["2-3"]);
  assert.deepEqual(spans(["u", "n", "i", "t", "e", "d", " ", "s"], "ted s"), ["3-7"]);
});

test("spaces beside signs do not count", () => {
  assert.deepEqual(spans(["it", "was", ",", "they", "said", "."], "was , they said."), ["1-5"]);
  assert.deepEqual(spans(["it", "was", ",", "they"], "it was,they"), ["0-3"]);
  assert.deepEqual(spans(["Lisa"], "is a"), []);
});

test("tokens that hold the text are found one by one, as they are written", () => {
  assert.deepEqual(spans(["▁cat", "▁catalogue", "▁dog"], "cat"), ["0-0", "1-1"]);
  assert.deepEqual(spans(["▁cat", "cat"], "▁cat"), ["0-0"]);
  assert.deepEqual(spans(["a", "b"], "zz"), []);
  assert.deepEqual(spans([" a", "b "], " "), ["0-0", "1-1"]);
});

test("what overlaps with a piece before is found once", () => {
  const tokens = ["▁the", "▁United", "▁States", "▁of", "▁the", "▁United", "▁States"];
  assert.deepEqual(spans(tokens, "united states"), ["1-2", "5-6"]);
  assert.deepEqual(spans(tokens.slice(1), "united states", 101, 1), ["101-102", "105-106"]);
  assert.deepEqual(spans(tokens.slice(1), "united states", 101, 2), ["105-106"]);
  assert.deepEqual(spans(tokens, "united", 0, 4), ["5-5"]);
});
