import assert from "node:assert/strict";
import { test } from "node:test";
import { coarser, divergences, leafOrder, shares } from "../src/clustering.ts";

const head = (...rows: number[][]) => shares(Float32Array.from(rows.flat()), rows.length, rows[0].length, () => 1);
const close = (a: number, b: number) => assert.ok(Math.abs(a - b) < 1e-6, `${a} is not ${b}`);

test("divergences by hand", () => {
  const [eye, other] = [head([1, 0], [0, 1]), head([0, 1], [1, 0])];
  const half = head([1, 0], [1, 0]);
  const between = divergences([eye, eye, other, half]);
  close(between[1], 0);
  close(between[2], Math.LN2);
  close(between[3], Math.LN2 / 2);
  close(between[3 * 4 + 2], Math.LN2 / 2);
  // Rows (1/2, 1/2) and (1, 0): H(3/4, 1/4) - ln(2) / 2.
  const mixed = -0.75 * Math.log(0.75) - 0.25 * Math.log(0.25) - Math.LN2 / 2;
  close(divergences([head([0.5, 0.5]), head([1, 0])])[1], mixed);
});

test("maps of other sizes have nothing in common", () => {
  close(divergences([head([1, 0]), head([1, 0, 0])])[1], Math.LN2);
});

test("shares are of rows, by the keys in each column, and what a row lacks is beside them", () => {
  const found = shares(Float32Array.of(0.5, 0.5, NaN, NaN, NaN, 0.2), 2, 3, (column) => (column === 2 ? 1 : 2));
  close(found.data[5], 0.2);
  assert.deepEqual([...found.data].slice(0, 5), [0.5, 0.5, 0, 0, 0]);
  assert.equal(found.rest[0], 0);
  close(found.rest[1], 0.8);
  const none = shares(Float32Array.of(NaN, NaN), 1, 2, () => 1);
  assert.deepEqual([...none.data, ...none.rest], [0, 0, 1]);
});

test("coarser shares are still shares", () => {
  const rows = Array.from({ length: 65 }, (_, row) => Array.from({ length: 65 }, (_, column) => ((row * column) % 7) + 1));
  const found = coarser(head(...rows), 500);
  assert.ok(found.rows < 65 && found.rows * found.columns * 500 * 250 <= 2 ** 24 * 1.01);
  for (let row = 0; row < found.rows; row += 1) {
    const sum = found.data.subarray(row * found.columns, (row + 1) * found.columns).reduce((a, b) => a + b, 0);
    assert.ok(Math.abs(sum - 1) < 1e-5);
  }
  const sink = shares(new Float32Array(65 * 65).fill(0.5 / 65), 65, 65, () => 1);
  const coarse = coarser(sink, 500);
  assert.ok(coarse.rest.every((rest) => Math.abs(rest - 0.5) < 1e-5) && coarse.rest.length === coarse.rows);
  const small = head([1, 0]);
  assert.equal(coarser(small, 4).data, small.data);
});

test("leaves of a literal tree", () => {
  // 0 and 3 are nearest, then 1 and 4, then these two pairs; 2 is far from all.
  const between = [
    [0, 5, 9, 1, 5],
    [5, 0, 9, 5, 2],
    [9, 9, 0, 9, 9],
    [1, 5, 9, 0, 6],
    [5, 2, 9, 6, 0],
  ];
  assert.deepEqual(leafOrder(Float32Array.from(between.flat()), 5), [0, 3, 1, 4, 2]);
  assert.deepEqual(leafOrder(Float32Array.of(0), 1), [0]);
  assert.deepEqual(leafOrder(new Float32Array(), 0), []);
});

test("clusters are turned so that the ends that meet are near", () => {
  const places = [0, 5, 2, 9, 1];
  const between = Float32Array.from(places.flatMap((a) => places.map((b) => Math.abs(a - b))));
  assert.deepEqual(leafOrder(between, 5), [0, 4, 2, 1, 3]);
});
