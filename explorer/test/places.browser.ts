/** A page of one file with single weights of some places alone: those around what it opens with. */

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { figure } from "../src/text.ts";
import { type Bench, open, settled, shapesOf, start } from "./harness.ts";
import { type HeldTile, staticPage } from "./static.ts";
import { short } from "./synthetic.ts";

const STATE = "view=head&map=1&head=1&at=640,600&frame=640,640,60";
const HELD: HeldTile[] = [0, 1].flatMap((map) => [0, 1].map((head): HeldTile => [map, head, 2, 2]));

let bench: Bench;
const atlas = short(2, 2, 800);
const folder = mkdtempSync(join(tmpdir(), "regard-"));
const address = pathToFileURL(join(folder, "page.html")).href;
before(async () => {
  bench = await start();
  writeFileSync(join(folder, "page.html"), staticPage(atlas, STATE, HELD));
});
after(async () => {
  await bench.close();
  rmSync(folder, { recursive: true });
});

test("the kept cell has its weight, and what is seen around it is exact", async () => {
  const { page, quiet } = await open(bench, address);
  await settled(page);
  assert.equal(await page.locator(".level").textContent(), "exact weights");
  const weight = Math.fround(atlas.maps[1].weight(1, 640, 600));
  assert.ok((await page.locator(".status").textContent())?.includes(figure(weight)));
  assert.match((await page.locator(".part").textContent()) ?? "", /^No single weights .* but around what it opens with:/);
  assert.match((await page.locator("aside").textContent()) ?? "", /no single weights but around what it opens with\./);
  quiet();
  await page.close();
});

test("elsewhere the page shows cells, and says that a weight is not there", async () => {
  const { page, quiet } = await open(bench, `${address}#view=head&map=1&head=1&at=20,10&frame=20,10,60`);
  await settled(page);
  assert.match((await page.locator(".level").textContent()) ?? "", /^max of \d+ × \d+ cells/);
  assert.match((await page.locator(".status").textContent()) ?? "", /not in this page/);
  quiet();
  await page.close();
});

test("lines are drawn in a window that is there, and told of elsewhere; tokens are shared", async () => {
  const { page, quiet } = await open(bench, `${address}#view=lines&map=1&head=1&window=560,560`, {
    size: { width: 1280, height: 500 },
  });
  await settled(page);
  const lines = (await shapesOf(page)).filter(({ kind }) => kind === "curve");
  assert.ok(lines.length > 5, `${lines.length} lines`);
  const labels = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
  assert.ok(labels.some((text) => text.includes(atlas.maps[0].token("query", 560))));
  await page.goto(`${address}#view=lines&map=1&head=1&window=100,100`);
  await settled(page);
  assert.equal((await shapesOf(page)).filter(({ kind }) => kind === "curve").length, 0);
  assert.match((await page.locator(".lines-view .level").textContent()) ?? "", /not in this page/);
  quiet();
  await page.close();
});

test("all heads are ordered by the kept pair, whose weights are there", async () => {
  const { page, quiet } = await open(bench, `${address}#view=grid&map=1&at=600,540&order=-kept:weight`);
  await settled(page);
  const text = (await page.locator(".grid-view").textContent()) ?? "";
  const weights = [0, 1].flatMap((map) => [0, 1].map((head) => atlas.maps[map].weight(head, 600, 540)));
  for (const weight of weights) assert.ok(text.includes(figure(Math.fround(weight))), `${figure(weight)} in ${text}`);
  quiet();
  await page.close();
});
