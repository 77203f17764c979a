import assert from "node:assert/strict";
import { test } from "node:test";
import { sampled } from "../src/profiles.ts";
import { choose, coarsest, countTiles, factorFor, tileRegion, tilesOf, words } from "../src/pyramid.ts";
import { cut, type Quad } from "../src/rendering/painter.ts";
import { fitted, stepFor, ticks } from "../src/rulers.ts";
import { type AttentionMap, EXACT } from "../src/types.ts";
import { between, cellAt, clamp, fit, fromFrame, pan, toFrame, visible, zoomAt } from "../src/viewport.ts";

const extent = { rows: 1000, columns: 400 };
const size = { width: 500, height: 300 };
const near = (a: number, b: number) => assert.ok(Math.abs(a - b) < 1e-9 * Math.max(1, Math.abs(b)), `${a} is not ${b}`);

test("a fitted map is whole and centred", () => {
  const view = fit(extent, size);
  near(view.scale, 0.3);
  near(view.row, 0);
  near(view.column, (400 - 500 / 0.3) / 2);
  assert.deepEqual(visible(view, extent, size), { row0: 0, row1: 1000, column0: 0, column1: 400 });
});

test("zooming keeps the cell under the pointer", () => {
  const before = { row: 100, column: 50, scale: 2 };
  const after = zoomAt(before, 3, 120, 80);
  near(after.row + 80 / after.scale, before.row + 80 / before.scale);
  near(after.column + 120 / after.scale, before.column + 120 / before.scale);
  near(after.scale, 6);
});

test("panning moves with the pointer, and not beyond the map", () => {
  const view = { row: 10, column: 10, scale: 5 };
  assert.deepEqual(pan(view, 10, -20), { row: 14, column: 8, scale: 5 });
  assert.deepEqual(clamp({ row: -5, column: 390, scale: 5 }, extent, size), { row: 0, column: 300, scale: 5 });
});

test("cells under points", () => {
  const view = { row: 10, column: 20, scale: 4 };
  assert.deepEqual(cellAt(view, extent, 0, 0), [10, 20]);
  assert.deepEqual(cellAt(view, extent, 7.9, 4), [11, 21]);
  assert.equal(cellAt(fit(extent, size), extent, 1, 1), undefined);
});

test("frames bring the same cells to windows of other sizes", () => {
  const view = { row: 10, column: 20, scale: 4 };
  const frame = toFrame(view, size);
  near(frame.span, 75);
  near(fromFrame(frame, size).row, 10);
  near(fromFrame(frame, { width: 1000, height: 600 }).scale, 8);
});

test("a glide starts, ends and grows evenly", () => {
  const from = { row: 0, column: 0, scale: 1 };
  const to = { row: 40, column: 60, scale: 4 };
  near(between(from, to, 0, size).scale, 1);
  near(between(from, to, 1, size).row, 40);
  near(between(from, to, 0.5, size).scale, 2);
});

const long: AttentionMap = {
  name: "long",
  call: 0,
  sequence: 0,
  kind: "self",
  heads: 1,
  queries: 100_000,
  keys: 100_000,
  levels: [
    [782, 782],
    [391, 391],
    [196, 196],
    [98, 98],
    [49, 49],
  ],
  cells: [
    [128, 128],
    [256, 256],
    [512, 512],
    [1024, 1024],
    [2048, 2048],
  ],
  metrics: {},
  roles: [],
};
const all = { row0: 0, row1: 100_000, column0: 0, column1: 100_000 };
const every = () => true;

test("the level fits the pixels", () => {
  assert.deepEqual(choose(long, 0.005, all, every), { level: 1, factor: 1 });
  assert.deepEqual(choose(long, 0.001, all, every), { level: 3, factor: 1 });
  assert.deepEqual(choose(long, 0.1, { row0: 0, row1: 9000, column0: 0, column1: 9000 }, every), {
    level: 0,
    factor: 1,
  });
  const near = { row0: 500, row1: 1300, column0: 500, column1: 1300 };
  assert.deepEqual(choose(long, 0.5, near, every), { level: EXACT, factor: 2 });
  assert.deepEqual(choose(long, 3, near, every), { level: EXACT, factor: 1 });
});

test("what a source does not offer is not chosen", () => {
  const near = { row0: 0, row1: 10, column0: 0, column1: 10 };
  assert.deepEqual(
    choose(long, 30, near, (level) => level >= 2),
    { level: 2, factor: 1 },
  );
  assert.equal(
    coarsest(long, (level) => level < 2),
    1,
  );
  assert.equal(coarsest({ ...long, levels: [] }, every), EXACT);
});

test("a short map without levels shows its weights", () => {
  const short = { ...long, queries: 9, keys: 9, levels: [], cells: [] } as AttentionMap;
  assert.deepEqual(choose(short, 40, { row0: 0, row1: 9, column0: 0, column1: 9 }, every), { level: EXACT, factor: 1 });
});

test("levels in words", () => {
  assert.equal(words(long, { level: EXACT, factor: 1 }, "max"), "exact weights");
  assert.equal(words(long, { level: EXACT, factor: 1 }, "max", "weights to within 0.4 %"), "weights to within 0.4 %");
  const whole = { ...long, cells: [[1, 1]] } as AttentionMap;
  assert.equal(words(whole, { level: 0, factor: 1 }, "max"), "weights, rounded");
  assert.equal(words(long, { level: EXACT, factor: 4 }, "mean"), "mean of 4 × 4 cells");
  assert.equal(words(long, { level: 0, factor: 1 }, "max"), "max of 128 × 128 cells");
});

test("tiles from the centre outwards", () => {
  const tiles = tilesOf({ row0: 0, row1: 700, column0: 200, column1: 800 });
  assert.equal(tiles.length, 12);
  assert.equal(countTiles({ row0: 0, row1: 700, column0: 200, column1: 800 }), 12);
  assert.deepEqual(tiles[0], { row: 1, column: 1 });
  assert.deepEqual(tileRegion(long, { row: 390, column: 0 }), {
    row0: 99_840,
    row1: 100_000,
    column0: 0,
    column1: 256,
  });
  assert.equal(factorFor(1), 1);
  assert.equal(factorFor(0.2), 8);
});

test("quads are cut to the plot with their sources", () => {
  const raster = { id: "r", rows: 10, columns: 10, data: new Float32Array(100) };
  const quad: Quad = {
    raster,
    source: { x: 0, y: 0, width: 10, height: 10 },
    target: { x: -50, y: 20, width: 100, height: 100 },
    maximum: 1,
  };
  const left = cut(quad, { width: 40, height: 60 });
  assert.deepEqual(left?.target, { x: 0, y: 20, width: 40, height: 40 });
  assert.deepEqual(left?.source, { x: 5, y: 0, width: 4, height: 4 });
  assert.equal(cut({ ...quad, target: { x: 50, y: 0, width: 9, height: 9 } }, { width: 40, height: 60 }), undefined);
});

test("labels leave one another room", () => {
  assert.equal(stepFor(20), 1);
  assert.equal(stepFor(12), 2);
  assert.equal(stepFor(0.3), 100);
  assert.deepEqual(
    ticks(100, 12, 60, 105).map(({ index }) => index),
    [100, 102, 104],
  );
  assert.deepEqual(ticks(-2, 20, 100, 2), [
    { index: 0, at: 50 },
    { index: 1, at: 70 },
  ]);
  const width = (text: string) => 10 * text.length;
  assert.equal(fitted("attention", 60, width), "atten…");
  assert.equal(fitted("map", 60, width), "map");
});

test("profiles keep the peaks of pixels that hold many rows", () => {
  const values = new Float32Array(1000).fill(1);
  values[777] = 9;
  const pixels = sampled(values, 0, 0.1, 100);
  assert.equal(Math.max(...pixels), 9);
  assert.equal(pixels[77], 9);
  assert.ok(Number.isNaN(sampled(values, -20, 1, 10)[0]));
});
