import assert from "node:assert/strict";
import { test } from "node:test";
import { isSpecial, runningText } from "../src/running_text.ts";

const read = (tokens: string[]) => runningText(tokens).map(({ text, before }) => before + text).join("");

test("tokens become running text by the signs of their tokenizer", () => {
  assert.equal(read(["[CLS]", "the", "un", "##seen", "cat", "didn", "'", "t", "sleep", ".", "[SEP]"]), "[CLS] the unseen cat didn ' t sleep. [SEP]");
  assert.equal(read(["▁The", "▁cat", "s", "▁sleep", ".", "</s>"]), "The cats sleep. </s>");
  assert.equal(read(["The", "Ġcat", "s", "Ċ", "ĠNow"]), "The cats↵\nNow");
  assert.equal(read(["▁고양", "이가", "▁책상", "▁위에", "▁있다", "."]), "고양이가 책상 위에 있다.");
  assert.equal(read([..."naïve"]), "naïve");
  assert.equal(read(["it", "was", "late", ",", "she", "said"]), "it was late, she said");
  assert.equal(read(["a", " dog", "gy", "\n", " end"]), "a doggy↵\nend");
  assert.equal(read([]), "");
  assert.equal(read(["▁", "##", "\u202ex"]), "▁##⟨U+202E⟩x", "a sign alone is a token of its own");
  assert.ok(read(["a".repeat(1e6)]).length < 300);
});

test("special tokens are told by their form", () => {
  for (const token of ["[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>", "<unk>", "<|endoftext|>", "<｜begin▁of▁sentence｜>", "<bos>"]) assert.ok(isSpecial(token), token);
  for (const token of ["cat", "[", "]", "<", "[1]", "a[b]", "<3", "##s", "▁the", ""]) assert.ok(!isSpecial(token), token);
});
