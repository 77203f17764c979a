import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { figure } from "../src/text.ts";
import { axeFaults } from "./chromium.ts";
import { type Bench, hashOf, open, settled, shapesOf, start } from "./harness.ts";
import { contribution, keptOfHead } from "./measures.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

const shows = (page: Page) => page.getByRole("combobox", { name: "Shows" });
const words = async (page: Page) => (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));

test("contributions are chosen where weights are, with their definition", async () => {
  const { page, quiet } = await open(bench, "small/#view=head&head=2&at=40,37");
  await settled(page);
  const { maps } = bench.served.atlas("small");
  const weight = await page.locator(".kept .kept-value").textContent();
  assert.equal(weight, figure(Math.fround(maps[0].weight(2, 40, 37))));
  assert.match((await shows(page).getAttribute("title")) ?? "", /^contribution ‖α·v·W_o‖: the weight α of a key times the length of its value v after the output projection/);
  await shows(page).focus();
  await shows(page).selectOption("contribution");
  await settled(page);
  assert.match(await hashOf(page), /measure=contribution/);
  assert.equal(await page.locator(".kept .kept-value").textContent(), figure(contribution(maps[0], 2, 40, 37)));
  assert.equal(await page.locator(".bar .meaning").textContent(), "‖α·v·W_o‖, the length of what the key adds to the output");
  assert.ok((await words(page)).some((text) => text.endsWith("·  ‖α·v·W_o‖")), "the legend says it");
  assert.match((await page.locator(".plot").getAttribute("aria-label")) ?? "", /heat map, (max of 2 × 2 cells|exact contributions)/);
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.control), "measure", "the focus stays");
  await page.keyboard.press("Escape");
  await page.locator(".regard-explorer").press("i");
  await settled(page);
  assert.equal(await shows(page).inputValue(), "weight");
  quiet();
});

for (const view of ["grid", "head", "lines", "text", "compare", "table"]) {
  test(`contributions in ${view}`, async () => {
    const { page, quiet } = await open(bench, `small/#view=${view}&head=1&at=40,37&pins=0.1,1.2&difference=1&measure=contribution`);
    await settled(page);
    assert.equal(await page.locator(".faults").isHidden(), true);
    if (view !== "table") assert.equal(await shows(page).inputValue(), "contribution");
    const asked = bench.served.asked.filter((url) => url.startsWith("/small/0/"));
    assert.ok(asked.length > 3);
    assert.deepEqual(await axeFaults(page), []);
    quiet();
  });
}

test("rows of contributions: lines, the list of a row and the shaded text have the same numbers", async () => {
  const { page, quiet } = await open(bench, "live/#view=text&map=0&head=2&at=3,&measure=contribution");
  await settled(page);
  const map = bench.served.atlas("live").maps[0];
  const row = [0, 1, 2, 3].map((column) => contribution(map, 2, 3, column));
  assert.match((await page.locator(".shading").textContent()) ?? "", /shaded by the contribution to the kept token\.$/);
  const titles = await page.locator(".running .token").evaluateAll((all) => all.map((one) => (one as HTMLElement).title));
  assert.deepEqual(titles, row.map((value, at) => `${at}: ${figure(Math.fround(value))}`));
  assert.equal(await page.getByRole("button", { name: "Hide sinks" }).count(), 0);
  const listed = await page.locator("aside .key-weight").allTextContents();
  assert.deepEqual(listed, row.filter((value) => value > 0).sort((a, b) => b - a).map((value) => figure(Math.fround(value))));
  assert.match((await page.locator("aside .chosen").textContent()) ?? "", /Together 100\.0 % of all contributions to this query\.$/);
  await page.keyboard.press("l");
  await settled(page);
  assert.match((await page.locator(".level").textContent()) ?? "", / · contribution ‖α·v·W_o‖/);
  // Of the sink, whose value has no length, no line is left.
  await page.getByRole("slider", { name: "Threshold, of the greatest" }).fill("0");
  await page.getByRole("slider", { name: "Greatest", exact: true }).fill("4");
  await settled(page);
  const pairs = [0, 1, 2, 3].flatMap((query) => [0, 1, 2, 3].filter((key) => contribution(map, 2, query, key) > 0));
  assert.match((await page.locator(".level").textContent()) ?? "", new RegExp(`^${pairs.length} lines`));
  quiet();
});

test("heads are ordered by contribution, also beside weights, and the order follows what is shown", async () => {
  const { page, quiet } = await open(bench, "small/#at=40,37");
  await settled(page);
  const { maps } = bench.served.atlas("small");
  const values = (by: "weight" | "contribution") =>
    maps.flatMap((map) => [0, 1, 2, 3].map((head) => Math.fround(keptOfHead(map, head, [40], [37], by)))).sort((a, b) => b - a);
  const told = async () => (await page.locator(".thumb .kept-value").allTextContents()).map((text) => text.split(" ")[0]);
  const written = (all: number[]) => all.map((value) => (value && value < 1e-3 ? value.toExponential(0) : value.toFixed(4)));
  await page.getByRole("combobox", { name: "Order" }).selectOption("-kept:contribution");
  await settled(page);
  assert.deepEqual(await told(), written(values("contribution")));
  assert.match((await page.locator(".count").textContent()) ?? "", /Under each: contribution from query to key, /);
  await page.getByRole("button", { name: "Order heads by it" }).click();
  await settled(page);
  assert.deepEqual(await told(), written(values("weight")));
  await shows(page).selectOption("contribution");
  await settled(page);
  assert.equal(await page.getByRole("combobox", { name: "Order" }).inputValue(), "-kept:contribution");
  assert.deepEqual(await told(), written(values("contribution")));
  quiet();
});

test("where an atlas has no norms they are not offered, and the page says why", async () => {
  const { page, quiet } = await open(bench, "cross/#view=head&measure=contribution");
  await settled(page);
  assert.equal(await shows(page).inputValue(), "weight");
  const option = shows(page).locator("option[value=contribution]");
  assert.equal(await option.isDisabled(), true);
  assert.equal(await option.textContent(), "contribution: no norms of values are in this record: record the model itself");
  assert.match((await shows(page).getAttribute("title")) ?? "", /^Contributions cannot be shown: no norms/);
  assert.match((await page.locator(".faults").textContent()) ?? "", /measure=contribution/);
  await page.locator(".plot").focus();
  await page.keyboard.press("i");
  assert.equal(await shows(page).inputValue(), "weight");
  quiet();
});
