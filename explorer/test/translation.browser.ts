import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { divergences, leafOrder, shares } from "../src/clustering.ts";
import { linked, type Method, scores, wordWeights } from "../src/links.ts";
import type { Shape } from "../src/shapes.ts";
import { figure } from "../src/text.ts";
import { type Bench, hashOf, open, plotBox, settled, shapesOf, start } from "./harness.ts";
import { weightsOf } from "./synthetic.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

/** The decoder's first map of the best translation. */
const BEST = 1;

function tokensOf(head: number) {
  const of = bench.served.atlas("translation").maps[BEST];
  const { queries, keys } = of.map;
  const data = weightsOf(of, head, { row0: 0, row1: queries, column0: 0, column1: keys });
  return { map: of.map, weights: { rows: queries, columns: keys, data } };
}

function wordsOf(head: number) {
  const { map, weights } = tokensOf(head);
  const [query, key] = map.words as [number[], number[]];
  return { map, between: wordWeights(weights, query, key) };
}

/** What the scores of a method should say. */
function told(head: number, method: Method, least = 0.2): RegExp {
  const { map, between } = wordsOf(head);
  assert.ok(map.gold);
  const found = scores(linked(between, method, least), map.gold);
  const rate = (100 * found.errorRate).toFixed(1).replace(".", "\\.");
  return new RegExp(`AER ${rate} %, precision .* \\(${found.inPossible} of ${found.links}\\)`);
}

test("translations of a beam: one is shown, and how it differs", async () => {
  const { page, quiet } = await open(bench, "translation/#view=head&map=4&head=2");
  await settled(page);
  const bar = page.locator(".beam-bar");
  assert.match((await bar.textContent()) ?? "", /1 of 3score -0\.4000Le chat noir dort sur la chaise\./);
  await page.keyboard.press("]");
  assert.equal(await hashOf(page), "#view=head&map=5&head=2&hypothesis=1");
  assert.deepEqual(await bar.locator("ins").allTextContents(), ["dans", "chaise noire."]);
  assert.deepEqual(await bar.locator("del").allTextContents(), ["noir", "sur", "chaise."]);
  assert.match((await page.locator("aside h2").textContent()) ?? "", /translation 2$/);
  await page.getByRole("button", { name: "All 3" }).click();
  await page.locator(".beam-row").nth(2).click();
  await settled(page);
  assert.match(await hashOf(page), /map=6&.*hypothesis=2&listed=1/);
  assert.equal(await page.locator(".beam-row[aria-current]").count(), 1);
  assert.match((await page.locator(".plot").getAttribute("aria-label")) ?? "", /translation 3/);
  // The layers that can be chosen are those of this translation.
  assert.equal(await page.getByTitle("Layer").locator("option").count(), 3);
  await page.keyboard.press("ArrowUp");
  assert.match(await hashOf(page), /map=3&/);
  await page.goBack();
  await page.waitForFunction(() => location.hash.includes("map=6"));
  await page.keyboard.press("Escape");
  await settled(page);
  assert.match((await page.locator(".count").textContent()) ?? "", /^9 of 9 heads/);
  quiet();
});

test("a permalink keeps the translation, also where a map is of all of them", async () => {
  const { page, quiet } = await open(bench, "translation/#view=lines&hypothesis=1");
  await settled(page);
  assert.match((await page.locator(".beam-bar strong").textContent()) ?? "", /^2 of 3/);
  quiet();
});

test("where there is one translation nothing is said of several", async () => {
  const { page, quiet } = await open(bench, "cross/#view=head");
  await settled(page);
  assert.equal(await page.locator(".beam").isVisible(), false);
  assert.equal(await page.getByRole("button", { name: "Words" }).count(), 0);
  quiet();
});

test("words: the tokens of a word are one row and one column", async () => {
  const { page, quiet } = await open(bench, `translation/#view=head&map=${BEST}&head=1&at=4,4`);
  await settled(page);
  await page.locator("[data-control=words]").focus();
  await page.keyboard.press("Enter");
  await settled(page);
  await page.waitForFunction(() => location.hash === "#view=head&map=1&head=1&at=3,3&words=1");
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.control), "words");
  assert.equal(await page.locator(".level").textContent(), "exact weights of words");
  const { between } = wordsOf(1);
  const value = figure(between.data[3 * between.columns + 3]);
  assert.match((await page.locator(".status").textContent()) ?? "", new RegExp(`dort .* sleeps · ${value}$`));
  assert.match((await page.locator("aside .muted").first().textContent()) ?? "", /7 × 7$/);
  const box = await plotBox(page);
  await page.mouse.move(box.x + (6.5 * box.width) / 7, box.y + (0.5 * box.height) / 7);
  await page.waitForFunction(
    (wanted) => document.querySelector(".tip strong")?.textContent === wanted,
    figure(between.data[6]),
  );
  await page.keyboard.press("w");
  await settled(page);
  // Both tokens of the word are kept, in place of the one of them that was.
  await page.waitForFunction(() => location.hash === "#view=head&map=1&head=1&at=3.4,3.4");
  assert.equal(await page.locator(".level").textContent(), "exact weights");
  quiet();
});

test("words in lines, grid and table", async () => {
  for (const view of ["lines", "grid", "table", "compare"]) {
    const { page, quiet } = await open(bench, `translation/#view=${view}&map=${BEST}&words=1&pins=1.0,4.1`);
    await settled(page);
    if (view === "lines") assert.match((await page.locator(".level").textContent()) ?? "", /queries 0–6, keys 0–6/);
    quiet();
    await page.close();
  }
});

test("gold links over the heat map, and what each method is worth", async () => {
  const { page, quiet } = await open(bench, `translation/#view=head&map=${BEST}&head=2`);
  await settled(page);
  const line = page.locator(".scores");
  assert.match((await line.textContent()) ?? "", /^6 sure and 2 possible gold links: choose an alignment/);
  const dashes = (shapes: Shape[]) => shapes.filter((shape) => shape.kind === "path" && shape.dash?.[0] === 5).length;
  assert.equal(dashes(await shapesOf(page)), 2);
  for (const method of ["argmax", "mutual", "grow-diag", "threshold"] as const) {
    await page.keyboard.press("a");
    await settled(page);
    assert.equal(await page.getByLabel("Alignment").inputValue(), method);
    assert.match((await line.textContent()) ?? "", told(2, method));
  }
  await page.getByLabel("at least").fill("0.4");
  await settled(page);
  assert.match((await line.textContent()) ?? "", told(2, "threshold", 0.4));
  await page.waitForFunction(() => location.hash.includes("least=0.4"));
  await page.locator(".plot").focus();
  await page.keyboard.press("o");
  await settled(page);
  assert.equal(dashes(await shapesOf(page)), 0);
  await page.waitForFunction(() => location.hash.includes("gold=0"));
  quiet();
});

test("gold links between words are as good by words as by tokens", async () => {
  for (const words of [0, 1]) {
    const { page, quiet } = await open(
      bench,
      `translation/#view=head&map=${BEST}&head=0&alignment=mutual&words=${words}`,
    );
    await settled(page);
    assert.match((await page.locator(".scores").textContent()) ?? "", told(0, "mutual"));
    quiet();
    await page.close();
  }
});

test("gold links in lines: whole for sure ones, dashed for possible ones", async () => {
  const { page, quiet } = await open(bench, `translation/#view=lines&map=${BEST}&head=2&alignment=argmax`);
  await settled(page);
  assert.match((await page.locator(".scores").textContent()) ?? "", told(2, "argmax"));
  const gold = await page
    .locator(".regard-explorer")
    .evaluate((node) => getComputedStyle(node).getPropertyValue("--gold").trim());
  const drawn = (await shapesOf(page)).filter((shape) => shape.kind === "curve" && shape.stroke === gold);
  assert.deepEqual([drawn.length, drawn.filter((shape) => shape.kind === "curve" && shape.dash).length], [8, 2]);
  await page.getByRole("button", { name: "Hide gold" }).click();
  await settled(page);
  assert.equal((await shapesOf(page)).filter((shape) => shape.kind === "curve" && shape.stroke === gold).length, 0);
  const download = page.waitForEvent("download");
  await page.getByRole("button", { name: "Show gold" }).click();
  await settled(page);
  await page.getByRole("button", { name: "SVG" }).click();
  const stream = await (await download).createReadStream();
  let svg = "";
  for await (const piece of stream) svg += piece;
  assert.equal(svg.match(/stroke-dasharray="6 5"/g)?.length, 2);
  quiet();
});

test("coverage and entropy stand beside a map of cross-attention", async () => {
  const { page, quiet } = await open(bench, `translation/#view=head&map=${BEST}&head=2`);
  await settled(page);
  const texts = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
  assert.ok(texts.includes("coverage") && texts.includes("entropy"), texts.join());
  const { weights } = tokensOf(2);
  const sums = Array.from({ length: weights.columns }, (_, column) =>
    weights.data.reduce((sum, value, cell) => (cell % weights.columns === column ? sum + value : sum), 0),
  );
  assert.ok(texts.includes(`≤ ${figure(Math.max(...sums))}`), texts.join());
  quiet();
});

test("heads that are alike stand together", async () => {
  const { page, quiet } = await open(bench, "small/");
  await settled(page);
  await page.getByLabel("Order").selectOption("similar");
  await page.waitForFunction(() => /Jensen-Shannon/.test(document.querySelector(".count")?.textContent ?? ""));
  const atlas = bench.served.atlas("small");
  const all = atlas.maps.flatMap((of, map) => Array.from({ length: of.map.heads }, (_, head) => ({ of, map, head })));
  const between = divergences(
    all.map(({ of, head }) => {
      const level = of.map.levels.length - 1;
      const [rows, columns] = of.map.levels[level];
      const cell = of.map.cells[level][1];
      return shares(of.pooled(head, level, "mean"), rows, columns, (at) => Math.min(cell, of.map.keys - at * cell));
    }),
  );
  const expected = leafOrder(between, all.length).map((at) => `${all[at].map}.${all[at].head}`);
  const thumbs = page.locator("button.thumb");
  const found = await thumbs.evaluateAll((nodes) =>
    nodes.map((node) => `${(node as HTMLElement).dataset.map}.${(node as HTMLElement).dataset.head}`),
  );
  assert.deepEqual(found, expected);
  assert.match((await thumbs.nth(1).textContent()) ?? "", /← 0\.\d{4}/);
  await page.waitForFunction(() => location.hash === "#order=similar"); // it is written when the page has come to rest
  quiet();
});
