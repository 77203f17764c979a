import assert from "node:assert/strict";
import { test } from "node:test";
import { EmbeddedSteps, merged, NotComputed, type StepTable, type StoredAnswer } from "../src/steps/answers.ts";
import { cellsOf, Covers } from "../src/steps/covers.ts";
import { Guesses, isHit, numberOf, textOf } from "../src/steps/guesses.ts";
import { decodeState, encodeState, readChanges, REQUEST, writeChanges } from "../src/steps/page_state.ts";
import { saying } from "../src/steps/page_words.ts";
import { stepNumber, subscripts } from "../src/steps/table_view.ts";
import { signed } from "../src/steps/what_if_panel.ts";

function table(key: string, more: Partial<StepTable> = {}): StepTable {
  const rows = [{ name: "s1", cells: ["0.250", "0.750"] }];
  return { key, title: { en: key, ko: key }, formula: "", columns: ["a", "b"], rows, given: false, ...more };
}

test("a state is what its address says", () => {
  const request = {
    ...REQUEST,
    mechanism: "scaled_dot",
    sentence: "I am & 나는",
    word: 3,
    kind: "encoder",
    layer: 2,
    head: null,
    source_word: 2,
    changes: ["score=dot", "add=2:-1.5"],
  };
  const state = { language: "ko" as const, request, predict: true, size: 5, theme: "dark" as const, framed: true };
  assert.deepEqual(decodeState(`#${encodeState(state, 3)}`, 3), state);
  const plain = { language: "en" as const, request: REQUEST, predict: false, size: 3, theme: "" as const, framed: false };
  assert.deepEqual(decodeState(encodeState(plain, 3), 3), plain);
});

test("an address that nobody wrote is read as far as it goes", () => {
  const state = decodeState("#lang=xx&word=-1&layer=1e3&head=&size=99&theme=neon&source_word=0", 3);
  assert.equal(state.language, "en");
  assert.deepEqual([state.request.word, state.request.layer, state.request.head], [1, null, 0]);
  assert.equal(state.request.source_word, 1);
  assert.deepEqual([state.size, state.theme], [6, ""]);
});

test("what-ifs are written in the grammar of the command, in one order", () => {
  const changes = ["score=scaled_dot", "scale=1", "flip=2", "flip=10", "drop=3", "add=1:2.5", "add=3:-4"];
  assert.deepEqual(writeChanges(readChanges(changes)), changes);
  assert.deepEqual(writeChanges(readChanges([...changes].reverse())), changes);
  const none = readChanges([]);
  none.added.set(2, 0);
  assert.deepEqual(writeChanges(none), []);
  assert.equal(readChanges(["scale=2"]).unscaled, false);
});

test("numbers are predicted row by row, sums after their rows, and the words of a prediction before theirs", () => {
  assert.deepEqual(cellsOf(table("weights", { sums: "rows", totals: ["1"] })), [
    "weights 0 0",
    "weights 0 1",
    "weights 0 sum",
  ]);
  assert.deepEqual(cellsOf(table("prediction")), [
    "prediction  0",
    "prediction 0 0",
    "prediction  1",
    "prediction 0 1",
  ]);
  const cut = table("context", { columns: ["1", 9, "2"], rows: [{ name: "c", cells: ["0", null, "1"] }] });
  assert.deepEqual(cellsOf(cut), ["context 0 0", "context 0 2"]);
  const summed = table("weighted_values.1", { sums: "columns", totals: ["1", null] });
  assert.deepEqual(cellsOf(summed).at(-1), "weighted_values.1 sum 0");
});

test("covers are over what is predicted, and go one by one, by table, or all", () => {
  const tables = [table("query", { given: true }), table("scores"), table("weights")];
  assert.equal(new Covers(tables, false).left, 0);
  const covers = new Covers(tables, true);
  assert.equal(covers.left, 4);
  assert.equal(covers.any("query"), false);
  assert.deepEqual(covers.next, { table: "scores", id: "scores 0 0" });
  covers.reveal("scores 0 1"); // in any order
  assert.equal(covers.has("scores 0 1"), false);
  assert.deepEqual(covers.next, { table: "scores", id: "scores 0 0" });
  covers.revealTable("scores");
  assert.equal(covers.any("scores"), false);
  assert.equal(covers.next?.table, "weights");
  covers.revealAll();
  assert.equal(covers.next, undefined);
});

test("a stored change has the tables of the trained steps that it does not change", async () => {
  const trained = { tables: [table("query"), table("weights")], command: "regard steps", keys: ["a"] };
  const changed = { tables: ["query", table("mask"), table("weights", { formula: "new" })], command: "c" };
  const answer = merged(changed as StoredAnswer, trained);
  assert.deepEqual(
    answer.tables.map(({ key, formula }) => key + formula),
    ["query", "mask", "weightsnew"],
  );
  assert.deepEqual([answer.keys, answer.command], [["a"], "c"]);
  const answers = { "2": trained, "2 flip=1": changed } as Record<string, StoredAnswer>;
  const source = new EmbeddedSteps({ options: { mechanisms: [], examples: [] }, answers, opening: "" });
  const request = { ...REQUEST, word: 2, changes: ["flip=1"] };
  assert.equal((await source.answer(request)).tables.length, 3);
  await assert.rejects(source.answer({ ...request, changes: ["flip=1", "flip=2"] }), NotComputed);
  await assert.rejects(source.answer({ ...request, word: 1, changes: [] }), NotComputed);
});

test("formulas have subscripts, titles their numbers, and sums their sign", () => {
  const below = (text: string) => subscripts(text).filter((part) => part.below);
  assert.deepEqual(
    below("s̃_t = tanh(W_c [c_t; y_{t-1}]) / Σ_k e_ij c_1").map(({ text }) => text),
    ["t", "c", "t", "t-1", "k", "ij", "1"],
  );
  assert.deepEqual(subscripts("no more"), [{ text: "no more", below: false }]);
  assert.equal(stepNumber("2. Attention weights"), "2");
  assert.equal(stepNumber("Scores"), "");
  assert.deepEqual([signed(1.5), signed(0), signed(-4)], ["+1.5", "0", "−4"]);
});

test("every word is there in both languages, and takes what it is about", () => {
  assert.equal(saying("ko")("was", "$&"), "이전 값 $&");
  assert.equal(saying("en")("more", "3"), "… 3 more");
});

test("a prediction is right within half of the second digit, however the number is written", () => {
  for (const prediction of ["0.25", "1/4", "0,25", " .254 ", "0.246"]) assert.ok(isHit(prediction, "0.250"), prediction);
  for (const prediction of ["0.256", "0.2", "", "a", "1/0"]) assert.ok(!isHit(prediction, "0.250"), prediction);
  assert.ok(isHit("−∞", "-∞") && isHit("-inf".replace("inf", "∞"), "-∞"));
  assert.ok(!isHit("∞", "-∞"));
  assert.ok(isHit(" Student", "student") && !isHit("girl", "student"));
  assert.ok(Number.isNaN(numberOf("1/")));
});

test("hits are counted of what was predicted, and a number is found by its name", () => {
  const changed = table("weights", { sums: "rows", totals: [["1", "2"]] });
  changed.rows[0].cells[1] = ["0.750", "0.500"];
  const tables = [changed, table("sums", { sums: "columns", totals: ["3", "4"] }), table("prediction")];
  assert.deepEqual(
    ["weights 0 0", "weights 0 1", "weights 0 sum", "sums sum 1", "prediction  1", "nothing 0 0"].map((id) =>
      textOf(tables, id),
    ),
    ["0.250", "0.750", "1", "4", "b", ""],
  );
  const guesses = new Guesses();
  assert.equal(guesses.note("weights 0 0", "1/4", "0.250"), true);
  assert.equal(guesses.note("weights 0 1", "1", "0.750"), false);
  assert.deepEqual([guesses.made, guesses.right, guesses.of("weights 0 1"), guesses.of("x")], [2, 1, false, undefined]);
});
