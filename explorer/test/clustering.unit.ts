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

test("shares are of rows, by the keys in each column, and no pair has none", () => {
  const found = shares(Float32Array.of(0.5, 0.5, NaN, NaN, NaN, 0.2), 2, 3, (column) => (column === 2 ? 1 : 2));
  assert.deepEqual([...found.data], [0.5, 0.5, 0, 0, 0, 1]);
  assert.deepEqual([...shares(Float32Array.of(NaN, NaN), 1, 2, () => 1).data], [0, 0]);
});

test("coarser shares are still shares", () => {
  const rows = Array.from({ length: 65 }, (_, row) => Array.from({ length: 65 }, (_, column) => ((row * column) % 7) + 1));
  const found = coarser(head(...rows), 500);
  assert.ok(found.rows < 65 && found.rows * found.columns * 500 * 250 <= 2 ** 24 * 1.01);
  for (let row = 0; row < found.rows; row += 1) {
    const sum = found.data.subarray(row * found.columns, (row + 1) * found.columns).reduce((a, b) => a + b, 0);
    assert.ok(Math.abs(sum - 1) < 1e-5);
  }
  const small = head([1, 0]);
  assert.equal(coarser(small, 4).data, small.data);
});

/** The tree by its definition: all pairs of clusters, all pairs of their members. */
function plainly(distances: Float32Array, count: number): number[] {
  let clusters = Array.from({ length: count }, (_, at) => [at]);
  while (clusters.length > 1) {
    let best: [number, number, number] = [Infinity, 0, 0];
    clusters.forEach((a, i) =>
      clusters.slice(i + 1).forEach((b, j) => {
        const sum = a.reduce((all, x) => all + b.reduce((part, y) => part + distances[x * count + y], 0), 0);
        const mean = sum / a.length / b.length;
        if (mean < best[0] - 1e-12) best = [mean, i, i + 1 + j];
      }),
    );
    const [, i, j] = best;
    const joined = [...clusters[i], ...clusters[j]];
    clusters = clusters.filter((_, at) => at !== i && at !== j);
    clusters.push(joined);
    clusters.sort((a, b) => Math.min(...a) - Math.min(...b));
  }
  return clusters[0];
}

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

test("the chain of nearest neighbours gives the tree of the definition", () => {
  let seed = 7;
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  for (const count of [2, 3, 8, 17, 30]) {
    const distances = new Float32Array(count * count);
    for (let a = 0; a < count; a += 1)
      for (let b = a + 1; b < count; b += 1) distances[a * count + b] = distances[b * count + a] = random();
    assert.deepEqual(leafOrder(distances, count), plainly(distances, count));
  }
});
