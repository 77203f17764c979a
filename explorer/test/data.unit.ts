import assert from "node:assert/strict";
import { test } from "node:test";
import { links, rowsOfInfinity, share } from "../src/bipartite.ts";
import { BROKEN_PIXEL, COLOUR_MAPS, SCALES, entry, paint, position, table } from "../src/colour.ts";
import { csvOf, escaped, svgOf } from "../src/exports.ts";
import { condition, heads } from "../src/ordering.ts";
import { argmaxima, difference, greatest, normalised, pool, quantile, rowMaxima } from "../src/raster.ts";
import { counted, partWords } from "../src/notices.ts";
import { figure, shortNames, visible } from "../src/text.ts";
import { checkedMeta, EXACT } from "../src/types.ts";
import { HOSTILE, short } from "./synthetic.ts";

const raster = (rows: number, columns: number, values: number[]) => ({
  id: "r",
  rows,
  columns,
  data: Float32Array.from(values),
});

test("colour maps are matplotlib's", () => {
  // Figures of matplotlib 3.11: viridis(0), viridis(255), cividis(128), magma(200), times 255.
  assert.deepEqual([...table("viridis", false).subarray(0, 4)], [68, 1, 84, 255]);
  assert.deepEqual([...table("viridis", false).subarray(1020, 1023)], [253, 231, 37]);
  for (const colours of COLOUR_MAPS) {
    const entries = table(colours, false);
    const light = (i: number) => 0.2126 * entries[4 * i] + 0.7152 * entries[4 * i + 1] + 0.0722 * entries[4 * i + 2];
    for (let i = 8; i < 256; i += 8) assert.ok(light(i) > light(i - 8), `${colours} does not grow lighter at ${i}`);
  }
});

test("the diverging map is lightest at nothing and has two different ends", () => {
  const entries = table("viridis", true);
  const sum = (i: number) => entries[4 * i] + entries[4 * i + 1] + entries[4 * i + 2];
  for (let i = 1; i < 256; i += 1) assert.ok(i < 128 ? sum(i) >= sum(i - 1) : sum(i) <= sum(i - 1), `at ${i}`);
  assert.ok(entries[2] > entries[0] + 60, "the lesser end is blue");
  assert.ok(entries[1020] > entries[1022] + 60, "the greater end is orange");
});

test("scales", () => {
  assert.equal(position(0.25, 1, "linear"), 0.25);
  assert.equal(position(0.25, 1, "sqrt"), 0.5);
  assert.ok(Math.abs(position(0.01, 1, "log") - 0.5) < 1e-12);
  assert.equal(position(1e-7, 1, "log"), 0);
  assert.equal(position(5, 1, "linear"), 1);
  assert.equal(position(1, 0, "sqrt"), 0);
  assert.equal(entry(-1, { colours: "viridis", scale: "linear", maximum: 1, signed: true }), 0);
  assert.equal(entry(1, { colours: "viridis", scale: "linear", maximum: 1, signed: true }), 255);
});

test("painting gives every value the entry of its scale", () => {
  const values = Float32Array.from({ length: 400 }, (_, i) => (i - 200) / 150);
  for (const scale of SCALES) {
    for (const signed of [false, true]) {
      for (const maximum of [0, 0.7, 1]) {
        const colouring = { colours: "magma", scale, maximum, signed } as const;
        const pixels = new Uint32Array(paint(values, colouring).buffer);
        const entries = new Uint32Array(table("magma", signed).buffer);
        values.forEach((value, i) => assert.equal(pixels[i], entries[entry(value, colouring)]));
      }
    }
  }
});

test("what does not exist is clear", () => {
  const pixels = paint(Float32Array.of(NaN, 0, 1), { colours: "viridis", scale: "linear", maximum: 1, signed: false });
  assert.deepEqual([...pixels], [0, 0, 0, 0, 68, 1, 84, 255, 253, 231, 37, 255]);
});

test("a cell without a pair stays so; in a mean the others count as 0", () => {
  const from = raster(3, 3, [1, NaN, NaN, 3, 2, NaN, 5, 6, 7]);
  assert.deepEqual([...pool(from, 2, "max").data], [3, NaN, 6, 7]);
  assert.deepEqual([...pool(from, 2, "mean").data], [1.5, NaN, 5.5, 7]);
});

test("a page that holds a part of an atlas says which", () => {
  const { meta } = short(2, 3, 96);
  const held = (whole: string[], level: number) => (map: number, head: number, asked: number) =>
    asked === EXACT ? whole.includes(`${map}/${head}`) : asked >= level;
  assert.deepEqual(counted(meta, held(["0/0", "1/2"], 0)), { heads: 6, whole: 2 });
  assert.equal(partWords(meta, () => true), "");
  assert.equal(
    partWords(meta, held(["0/0", "0/1", "0/2"], 0)),
    "Exact weights of 3 of 6 heads are in this page, of the others cells of 2 × 2 weights and more.",
  );
  meta.all = "regard explore ATLAS serves all";
  assert.equal(
    partWords(meta, held([], 0)),
    "No single weights are in this page: of all 6 heads it has cells of 2 × 2 weights and more; " +
      "regard explore ATLAS serves all.",
  );
  meta.exact = "weights to within 0.4 %";
  assert.match(partWords(meta, held(["1/1"], 1)), /^Weights to within 0\.4 % of 1 of 6 heads .* cells of many weights/);
});

test("rows, differences, greatest", () => {
  const from = raster(2, 3, [1, 4, 2, NaN, 0, 5]);
  assert.deepEqual([...rowMaxima(from)], [4, 5]);
  assert.deepEqual([...normalised(from, (row) => [4, 5][row]).data], [0.25, 1, 0.5, NaN, 0, 1]);
  assert.deepEqual([...difference(from, from).data], [0, 0, 0, NaN, 0, 0]);
  assert.deepEqual([...argmaxima(from)], [1, 2]);
  assert.deepEqual([...argmaxima(raster(1, 2, [NaN, NaN]))], [-1]);
  assert.equal(
    quantile(
      Float32Array.from({ length: 1000 }, (_, i) => (i % 2 ? -i : NaN)),
      0.99,
    ),
    991,
  );
  assert.equal(quantile(Float32Array.of(NaN, 0), 0.99), 0);
  assert.equal(greatest(Float32Array.of(NaN, -3, 2)), 3);
});

test("lines are the greatest weights of each query or key", () => {
  const weights = Float32Array.of(0.7, 0.2, 0.1, NaN, 0.6, 0.4);
  const chosen = { threshold: 0.15, top: 1, direction: "query" } as const;
  assert.deepEqual(
    links(weights, 2, 3, chosen).map(({ row, column }) => [row, column]),
    [
      [0, 0],
      [1, 1],
    ],
  );
  const byKey = links(weights, 2, 3, { ...chosen, direction: "key" });
  assert.deepEqual(
    byKey.map(({ row, column }) => [row, column]),
    [
      [0, 0],
      [1, 1],
      [1, 2],
    ],
  );
  assert.ok(Math.abs(share(weights, 2, 3) - 1) < 1e-6);
});

test("tokens are shown as text, and all of it", () => {
  assert.equal(visible("<b>&"), "<b>&");
  assert.equal(visible(" the"), "␣the");
  assert.equal(visible("\u202eexe"), "⟨U+202E⟩exe");
  assert.equal(visible("a\nb\u0000"), "a␊b␀");
  assert.equal(visible(""), "∅");
  assert.equal(visible("x".repeat(5e6)).length, 64);
  for (const token of HOSTILE)
    assert.ok(visible(token).length <= 130 && !/[\u0000-\u001f\u202a-\u202e\u200b-\u200f]/.test(visible(token)));
});

test("figures and names", () => {
  assert.deepEqual([0, 0.12345, 12.345, 1234.5, 0.00001234, NaN, null].map(figure), [
    "0.0000",
    "0.1235",
    "12.35",
    "1234.5",
    "1.23e-5",
    "–",
    "–",
  ]);
  assert.deepEqual(shortNames(["a.layer.0.self", "a.layer.1.self"]), ["layer.0", "layer.1"]);
  assert.deepEqual(shortNames(["encoder.0.attn", "decoder.0.attn"]), ["encoder", "decoder"]);
  assert.deepEqual(shortNames(["one"]), ["one"]);
  assert.deepEqual(shortNames(["attn", "attn"]), ["attn", "attn"]);
});

test("heads are found and sorted", () => {
  const { meta } = short(2, 4, 32);
  const names = shortNames(meta.maps.map(({ name }) => name));
  const plain = { order: "layer", role: "", metric: "", find: "", hypothesis: 0 };
  assert.equal(heads(meta, names, plain).length, 8);
  const values = heads(meta, names, { ...plain, order: "-entropy" }).map(
    ({ map, head }) => meta.maps[map].metrics.entropy[head] as number,
  );
  assert.deepEqual(
    values,
    [...values].sort((a, b) => b - a),
  );
  assert.equal(
    heads(meta, names, { ...plain, find: "h.1" }).every(({ map }) => map === 1),
    true,
  );
  const bound = values[3] - 1e-9;
  assert.equal(heads(meta, names, { ...plain, metric: `entropy > ${bound}` }).length, 4);
  assert.deepEqual(condition("effective_keys<=2.5"), { metric: "effective_keys", above: false, bound: 2.5 });
  assert.equal(condition("entropy"), undefined);
});

test("CSV and SVG escape what they are given", () => {
  assert.equal(
    csvOf([
      ['a"b', 1.5, "=1+1"],
      [NaN, "x,y"],
    ]),
    '"a""b",1.5,"\'=1+1"\r\n,"x,y"',
  );
  assert.equal(escaped("<a href='x'>\u0000&"), "&lt;a href=&apos;x&apos;&gt;&amp;");
  const svg = svgOf(
    {
      title: "<t>",
      width: 10,
      height: 10,
      shapes: [{ kind: "text", x: 1, y: 2, text: "</text><script>", colour: "#000000" }],
    },
    "#ffffff",
  );
  assert.ok(!svg.includes("<script>") && svg.includes("<title>&lt;t&gt;</title>"));
});

test("meta data that cannot be are refused", () => {
  assert.throws(() => checkedMeta({}), /no list of maps/);
  assert.throws(
    () => checkedMeta({ maps: [{ name: "m", heads: 0, queries: 3, keys: 3 }] }),
    /m has heads, queries, keys 0, 3, 3/,
  );
  const meta = checkedMeta({
    version: 1,
    title: "",
    maps: [{ name: "m", heads: 1, queries: 10, keys: 10, levels: [[5, 5]] }],
  });
  assert.deepEqual(meta.maps[0].cells, [[2, 2]]);
});

test("infinity stands for a weight that is not a number, and stays apart from NaN, a pair that does not exist", () => {
  const [a, b] = [raster(1, 4, [Infinity, 1, NaN, 0.5]), raster(1, 4, [Infinity, Infinity, 1, 0.25])];
  assert.deepEqual([...difference(a, b).data], [Infinity, Infinity, NaN, 0.25]);
  assert.deepEqual([...rowMaxima(a)], [1]);
  assert.deepEqual([...normalised(a, () => 0.5).data], [Infinity, 2, NaN, 1]);
  assert.deepEqual([greatest(a.data), quantile(a.data, 0.99)], [1, 1]);
  assert.deepEqual([...argmaxima(raster(2, 2, [1, Infinity, 0.25, 0.5]))], [-1, 1]);
  assert.deepEqual([...pool(a, 2, "mean").data, ...pool(a, 4, "max").data], [Infinity, 0.25, Infinity]);
  const colouring = { colours: "viridis", scale: "sqrt", maximum: 1, signed: false } as const;
  const pixels = new Uint32Array(paint(a.data, colouring).buffer);
  assert.deepEqual([pixels[0], pixels[2]], [BROKEN_PIXEL, 0]);
  assert.equal(csvOf([[...a.data]]), "NaN,1,,0.5");
  assert.deepEqual(links(Float32Array.of(Infinity, 0.4, 0.6, 0.4), 2, 2, { threshold: 0, top: 1, direction: "query" }), [
    { row: 1, column: 0, weight: Math.fround(0.6) },
    { row: 0, column: 1, weight: Math.fround(0.4) },
  ]);
  assert.equal(share(Float32Array.of(Infinity, 0.4, 0.5, 0.25), 2, 2), 0.75);
  assert.equal(rowsOfInfinity(Float32Array.of(Infinity, 0.4, 0.5, 0.25), 2), 1);
});
