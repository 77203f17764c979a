/** Rows of any length: their greatest keys wherever they are, phrases, numbers beside the map, what is seen in a file. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { figure, whole } from "../src/text.ts";
import { axeFaults, withoutAxe } from "./chromium.ts";
import { type Bench, hashOf, open, settled, shapesOf, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

/** The greatest keys of a query of the long atlas, as the formula has them. */
function greatest(query: number): { index: number; weight: number }[] {
  const { map, weight } = bench.served.atlas("long").maps[0];
  return Array.from({ length: map.keys }, (_, index) => ({ index, weight: Math.fround(weight(0, query, index)) }))
    .filter((one) => one.weight > 0)
    .sort((a, b) => b.weight - a.weight)
    .slice(0, 8);
}

test("lines list the greatest keys of the kept query, wherever they are, and lead there", async () => {
  const { page, quiet } = await open(bench, "long/#view=lines&at=60000,&window=59990,59990");
  await settled(page);
  const expected = greatest(60_000);
  const items = page.locator(".far .far-key");
  const texts = await items.allTextContents();
  assert.equal(texts.length, expected.length);
  expected.forEach(({ index, weight }, at) => {
    assert.ok(texts[at].includes(whole(index)) && texts[at].endsWith(figure(weight)), `${texts[at]}: ${index} ${weight}`);
  });
  const [far] = expected.filter(({ index }) => index < 59_900);
  assert.ok(far, "a key is far away");
  const dashed = (await shapesOf(page)).filter((shape) => shape.kind === "curve" && shape.dash?.join() === "5,4");
  const away = expected.filter(({ index }) => index < 59_990 || index > 60_015).length;
  assert.ok(dashed.length >= 1 && dashed.length <= away, `${dashed.length} of ${away}`);
  await items.nth(expected.indexOf(far)).click();
  await settled(page);
  const labels = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
  assert.ok(labels.some((text) => text.includes(whole(far.index))), `${whole(far.index)} in ${labels.join()}`);
  quiet();
  await page.close();
});

test("beside the map they stand, too, where a row is long", async () => {
  const { page, quiet } = await open(bench, "long/#view=head&at=60000,59000");
  await settled(page);
  const rows = await page.locator("aside .key-row").allTextContents();
  const expected = greatest(60_000);
  assert.equal(rows.length, expected.length);
  assert.ok(rows[0].startsWith(whole(expected[0].index)));
  quiet();
  await page.close();
});

test("a finger reaches them, and nothing is wider than a phone", { skip: withoutAxe }, async () => {
  const { page, quiet } = await open(bench, "long/#view=lines&at=60000,&window=59990,59990", {
    touch: true,
    size: { width: 390, height: 844 },
    scheme: "dark",
  });
  await settled(page);
  const first = page.locator(".far .far-key").first();
  await first.tap();
  await settled(page);
  assert.equal(await page.locator(".kept .chip").count(), 2);
  assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 390);
  assert.deepEqual(await axeFaults(page), []);
  quiet();
  await page.close();
});
test("a phrase is found across tokens, and all of them are kept", async () => {
  const { page, quiet } = await open(bench, "long/#view=head&at=10,10");
  await settled(page);
  const { token } = bench.served.atlas("long").maps[0];
  const words = [777, 778, 779].map((index) => token("query", index).trim());
  await page.keyboard.press("g");
  const dialog = page.locator("dialog[open]");
  await dialog.getByLabel("index, token or phrase").fill(words.join(" ").toUpperCase());
  const match = dialog.locator(".results button").first();
  await match.waitFor();
  const numbers = /^([\d,]+)–([\d,]+)/.exec((await match.textContent()) ?? "");
  const [first, last] = (numbers ?? []).slice(1).map((text) => Number(text.replace(/,/g, "")));
  assert.equal(last - first, 2);
  for (const at of [0, 1, 2]) assert.equal(token("query", first + at).trim(), words[at]);
  await match.click();
  await page.waitForFunction((at) => location.hash.includes(`at=${at},10`), [first, first + 1, last].join("."));
  quiet();
  await page.close();
});

test("beside single tokens stand their numbers", async () => {
  const { page, quiet } = await open(bench, "long/#view=head&frame=60000,59990,20");
  await settled(page);
  const texts = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
  for (const index of [59_995, 60_000, 60_005]) assert.ok(texts.includes(whole(index)), `${whole(index)} in ${texts.join()}`);
  assert.ok(!texts.includes(whole(60_001)));
  quiet();
  await page.close();
});

test("zoomed in, the whole map stands in small, and a press leads there, also of a finger", async () => {
  for (const touch of [false, true]) {
    const { page, quiet } = await open(bench, "long/#view=head", touch ? { touch, size: { width: 390, height: 844 } } : {});
    await settled(page);
    const small = page.locator(".minimap");
    assert.equal(await small.isVisible(), false);
    await page.goto(`${bench.served.address}/long/?renderer=canvas#view=head&frame=60000,59990,200`);
    await settled(page);
    await small.waitFor();
    const box = await small.boundingBox();
    assert.ok(box);
    const place = { x: box.width * 0.25, y: box.height * 0.9 };
    if (touch) await small.tap({ position: place });
    else await small.click({ position: place });
    await page.waitForFunction(() => !location.hash.includes("frame=60000"));
    const frame = /frame=([\d.]+),([\d.]+),([\d.]+)/.exec(await hashOf(page))?.slice(1).map(Number) ?? [];
    assert.ok(Math.abs(frame[0] - 90_000) < 3000 && Math.abs(frame[1] - 25_000) < 3000, frame.join());
    assert.ok(Math.abs(frame[2] - 200) < 1, "as large as before");
    assert.equal(await page.locator(".kept .chip").count(), 0, "the press keeps nothing of the map below");
    quiet();
    await page.close();
  }
});

/** The number at the end of the colours. */
async function lastColour(page: Page): Promise<number> {
  await settled(page);
  const texts = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
  const found = texts.map((text) => /^≥ ([\d.e-]+)/.exec(text)?.[1]).find((text) => text !== undefined);
  assert.ok(found, texts.join(" | "));
  return Number(found);
}

test("the colours of a part of the map are those of what is in sight, unless the whole map's are wanted", async () => {
  // Below the sink of the first column all weights are small.
  const { page, quiet } = await open(bench, "small/#view=head&head=1&frame=30,20,12");
  const { map, weight } = bench.served.atlas("small").maps[0];
  const near = await lastColour(page);
  let most = 0;
  for (let row = 20; row < 40; row += 1) for (let column = 8; column < Math.min(row, 34); column += 1) most = Math.max(most, weight(1, row, column) || 0);
  assert.ok(near <= most, `${near} of ${most}`);
  await page.keyboard.press("u");
  await page.waitForFunction(() => location.hash.includes("sight=0"));
  const whole = await lastColour(page);
  assert.ok(whole > 2 * near, `${whole} and ${near}`);
  await page.keyboard.press("u");
  assert.equal(await lastColour(page), near);
  await page.keyboard.press("0");
  assert.equal(await lastColour(page), whole, "of the whole map both are the same");
  assert.ok(map.queries > 40);
  quiet();
  await page.close();
});

test("the file of a pooled view has the cells that are seen", async () => {
  const { page, quiet } = await open(bench, "long/#view=head&frame=60000,59000,20000");
  await settled(page);
  const told = /^max of (\d+) × \d+ cells/.exec((await page.locator(".head-view .level").textContent()) ?? "");
  const size = Number(told?.[1]);
  assert.ok(size > 1);
  const [download] = await Promise.all([page.waitForEvent("download"), page.evaluate(() => {
    void (document.getElementById("regard-explorer") as unknown as { explorer: { save(kind: string): Promise<void> } }).explorer.save("csv");
  })]);
  const lines = readFileSync(await download.path(), "utf8").split("\r\n");
  const head = lines[0].split(",").map((text) => text.replace(/"/g, ""));
  const [first, last] = head[1].split("–").map(Number);
  assert.equal(last - first + 1, size);
  assert.ok(first <= 59_000 && Number(lines[1].split(",")[0].replace(/"/g, "").split("–")[0]) >= 49_000);
  const level = bench.served.atlas("long").maps[0].map.cells.findIndex(([high]) => high === size);
  const values = bench.served.atlas("long").maps[0].pooled(0, level, "max");
  const columns = bench.served.atlas("long").maps[0].map.levels[level][1];
  const row = Number(lines[5].split(",")[0].replace(/"/g, "").split("–")[0]) / size;
  const value = lines[5].split(",")[3];
  const expected = values[row * columns + first / size + 2];
  assert.equal(value === "" ? NaN : Number(value), Number.isNaN(expected) ? NaN : expected);
  quiet();
  await page.close();
});
