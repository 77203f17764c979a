import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { npzOf } from "../src/npz.ts";

test("arrays are written as in the file that NumPy reads in the tests of the package", () => {
  const bytes = npzOf({
    weights: { shape: [2, 3], data: Float32Array.of(0.5, 0.25, NaN, 1, 0, 2 ** -30) },
    queries: { shape: [2], data: Int32Array.of(70_000, 70_001) },
    keys: { shape: [3], data: Int32Array.of(0, 1, -1) },
    query_tokens: ["été", "𝒜b"],
    key_tokens: ["", "a", "x".repeat(300)],
    nothing: [],
  });
  assert.deepEqual(Buffer.from(bytes), readFileSync("test/arrays.npz"));
});
