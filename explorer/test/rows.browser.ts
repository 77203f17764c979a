/** Rows of any length: their greatest keys wherever they are, phrases, numbers beside the map, what is seen in a file. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { figure, whole } from "../src/text.ts";
import { axeFaults, withoutAxe } from "./chromium.ts";
import { type Bench, open, settled, shapesOf, start } from "./harness.ts";

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
void readFileSync;
