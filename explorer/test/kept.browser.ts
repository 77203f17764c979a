import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { figure } from "../src/text.ts";
import type { Viewport } from "../src/viewport.ts";
import { type Bench, hashOf, open, plotBox, type Root, settled, shapesOf, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

const told = async (page: Page) => {
  await settled(page);
  return page.locator(".kept .chip").evaluateAll((chips) => chips.map((chip) => (chip.textContent ?? "").replace(/^let go of /, "").replace(/\s+/g, " ")));
};
/** What the address says of it, once it has been written. */
const address = (page: Page, at: string | undefined) =>
  page.waitForFunction((wanted) => (/[#&]at=([^&]*)/.exec(location.hash)?.[1] ?? "") === wanted, at ?? "");
/** The middle of a cell of the map that is shown. */
async function cell(page: Page, row: number, column: number): Promise<[number, number]> {
  await settled(page);
  const box = await plotBox(page);
  const from = await page.evaluate(() => {
    const { view } = (document.getElementById("regard-explorer") as unknown as Root).explorer;
    return (view.panel as unknown as { viewport(): Viewport }).viewport();
  });
  return [box.x + (column + 0.5 - from.column) * from.scale, box.y + (row + 0.5 - from.row) * from.scale];
}
/** Where a token of the lines stands. */
const line = (side: "query" | "key", index: number, width: number) => ({ x: side === "query" ? 60 : width - 60, y: 34 + 21 * (index + 0.5) });

test("what is kept is the same in all views, and stays", async () => {
  const { page, quiet } = await open(bench, "live/#view=head");
  assert.match((await page.locator(".kept").textContent()) ?? "", /^Nothing is kept\. Click or tap/);
  await page.mouse.click(...(await cell(page, 2, 1)));
  assert.deepEqual(await told(page), ["query 2 late ×", "key 1 was ×"]);
  const { weight } = bench.served.atlas("live").maps[0];
  assert.equal(await page.locator(".kept .kept-value").textContent(), figure(Math.fround(weight(0, 2, 1))));
  for (const key of ["l", "t", "Escape", "c", "h"]) {
    await page.keyboard.press(key);
    assert.deepEqual(await told(page), ["query 2 late ×", "key 1 was ×"], key);
  }
  await page.keyboard.press("ArrowDown"); // another layer of the same text
  await address(page, "2,1");
  await page.locator(".kept .chip").first().click();
  assert.deepEqual(await told(page), ["key 1 was ×"]);
  await page.keyboard.press("Backspace");
  assert.deepEqual(await told(page), []);
  await address(page, undefined);
  quiet();
});

test("a token beside the map and one of the lines are kept by a press, several with Shift", async () => {
  const { page, quiet } = await open(bench, "live/#view=head");
  await settled(page);
  const box = await plotBox(page);
  const [, y] = await cell(page, 3, 0);
  await page.mouse.click(box.x - 20, y);
  assert.deepEqual(await told(page), ["query 3 . ×"]);
  await page.keyboard.press("l");
  await settled(page);
  const canvas = page.locator("[aria-label^='lines between']");
  const width = (await canvas.boundingBox())?.width ?? 0;
  await canvas.click({ position: line("key", 2, width) });
  assert.deepEqual(await told(page), ["query 3 . ×", "key 2 late ×"]);
  await canvas.click({ position: line("key", 0, width), modifiers: ["Shift"] });
  assert.deepEqual(await told(page), ["query 3 . ×", "key 0 it ×", "key 2 late ×"]);
  await canvas.click({ position: line("query", 3, width) });
  assert.deepEqual(await told(page), ["key 0 it ×", "key 2 late ×"]);
  await canvas.press("ArrowLeft");
  await canvas.press("ArrowDown");
  assert.deepEqual((await told(page))[0], "query 1 was ×");
  quiet();
});

test("touch keeps cells and tokens", async () => {
  const { page, quiet } = await open(bench, "live/#view=head", { touch: true, size: { width: 390, height: 844 } });
  await settled(page);
  await page.touchscreen.tap(...(await cell(page, 3, 2)));
  assert.deepEqual(await told(page), ["query 3 . ×", "key 2 late ×"]);
  const [x] = await cell(page, 0, 1);
  await page.touchscreen.tap(x, (await plotBox(page)).y - 20);
  assert.deepEqual(await told(page), ["query 3 . ×", "key 1 was ×"]);
  await page.getByRole("button", { name: "Lines" }).tap();
  await settled(page);
  const box = await page.locator("[aria-label^='lines between']").boundingBox();
  assert.ok(box);
  const place = line("query", 2, box.width);
  await page.touchscreen.tap(box.x + place.x, box.y + place.y);
  assert.deepEqual(await told(page), ["query 2 late ×", "key 1 was ×"]);
  await page.getByRole("button", { name: "Let go", exact: true }).tap();
  assert.deepEqual(await told(page), []);
  quiet();
});

test("arrow keys keep the cell beside, and readers are told its tokens and weight", async () => {
  const { page, quiet } = await open(bench, "live/#view=head&at=1,0");
  const plot = page.locator(".plot");
  await plot.focus();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowRight");
  await settled(page);
  await address(page, "2,1");
  const { weight } = bench.served.atlas("live").maps[0];
  const words = `query 2  late · key 1  was · ${figure(Math.fround(weight(0, 2, 1)))}`;
  assert.equal(await page.locator(".status").textContent(), words);
  assert.equal(
    await plot.getAttribute("aria-label"),
    `h.0 · head 0: heat map, exact weights. Kept: ${words}. Arrow keys keep the cell beside.`,
  );
  for (const key of ["End", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown"]) await page.keyboard.press(key);
  await address(page, "3,3");
  assert.match(await hashOf(page), /view=head&at/); // the head is the one that it was
  quiet();
});

test("a cell far away is in sight in the next view, and as far as keys lead", async () => {
  const { page, quiet } = await open(bench, "long/#view=head&frame=12000,40,30&at=12000,40");
  await settled(page);
  await page.keyboard.press("l");
  await settled(page);
  const names = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" && shape.bold ? [shape.x] : []));
  assert.equal(names.length, 2, "both tokens stand out");
  assert.match((await page.locator(".level").textContent()) ?? "", / · queries 11,9\d\d–12,0\d\d, keys \d+–\d+ · /);
  await page.goto(`${page.url().split("#")[0]}#view=head&frame=12000,40,10&at=12003,40`);
  await settled(page);
  await page.locator(".plot").focus();
  for (let step = 0; step < 9; step += 1) await page.keyboard.press("ArrowDown");
  await address(page, "12012,40");
  await page.waitForFunction(() => Number(/frame=(\d+)/.exec(location.hash)?.[1]) > 12_003);
  quiet();
});

test("another sentence has what is kept by its words", async () => {
  const { page, quiet } = await open(bench, "live/#view=head&at=3,2");
  await settled(page);
  const run = async (text: string) => {
    await page.locator(".rerun textarea").fill(text);
    await page.locator(".rerun textarea").press("Enter");
    await page.waitForFunction((text) => document.querySelector("h1")?.textContent === text, text);
  };
  await run("yesterday it was very late .");
  assert.deepEqual(await told(page), ["query 5 . ×", "key 4 late ×"]);
  await run("yesterday it was early .");
  assert.deepEqual(await told(page), ["query 4 . ×"]);
  assert.match((await page.locator(".kept").textContent()) ?? "", /This text does not have 1 of the kept tokens; let go\.$/);
  await address(page, "4,");
  quiet();
});

test("heads are ordered by what is kept, with value and rank on each", async () => {
  const { page, quiet } = await open(bench, "small/#at=40,37");
  await settled(page);
  const { maps } = bench.served.atlas("small");
  const weights = maps.flatMap((map, at) => [0, 1, 2, 3].map((head) => ({ at, head, value: Math.fround(map.weight(head, 40, 37)) })));
  const rank = (value: number) => 1 + weights.filter((other) => other.value > value).length;
  const words = ({ value }: { value: number }) => `${figure(value)} · ${rank(value)} of 8`;
  const brief = ({ value }: { value: number }) => `${value < 1e-3 ? value.toExponential(0) : value.toFixed(4)} #${rank(value)}`;
  const values = () => page.locator(".thumb .kept-value").allTextContents();
  await page.waitForFunction(() => document.querySelectorAll(".thumb .kept-value:not([hidden])").length === 8);
  assert.deepEqual(await values(), weights.map(brief), "by layer");
  assert.match((await page.locator(".count").textContent()) ?? "", /Under each: weight from query to key, and behind # its rank among 8 heads\.$/);
  await page.getByRole("button", { name: "Order heads by it" }).click();
  await settled(page);
  const ordered = [...weights].sort((a, b) => b.value - a.value);
  assert.deepEqual(await values(), ordered.map(brief));
  assert.match((await page.locator("button.thumb").first().locator(".told").textContent()) ?? "", /Kept: 0\.\d{4} · 1 of 8$/);
  await page.locator("button.thumb").first().click();
  await settled(page);
  assert.equal(await page.locator(".kept .kept-value").textContent(), figure(ordered[0].value));
  await page.keyboard.press("t");
  await settled(page);
  const column = page.locator("tbody tr td:nth-child(4)");
  assert.deepEqual(await column.allTextContents(), ordered.map(words));
  // Two keys of one query are summed.
  await page.goto(`${page.url().split("#")[0]}#at=40,36.37&order=-kept:weight`);
  await page.waitForFunction(() => document.querySelector(".count")?.textContent?.includes("summed over the kept keys"));
  await settled(page);
  const sums = maps.flatMap((map) => [0, 1, 2, 3].map((head) => Math.fround(map.weight(head, 40, 36)) + Math.fround(map.weight(head, 40, 37))));
  assert.deepEqual((await values()).map((text) => text.split(" ")[0]), sums.sort((a, b) => b - a).map((value) => value.toFixed(4)));
  quiet();
});
