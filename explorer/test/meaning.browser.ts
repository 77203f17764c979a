import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { axeFaults, withoutAxe } from "./chromium.ts";
import { type Bench, hashOf, open, plotBox, settled, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

const VIEWS = ["grid", "head", "lines", "text", "compare", "table"];

test("axe finds nothing in any view, light and dark, wide and narrow", { skip: withoutAxe }, async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice", "experimental"];
  for (const [scheme, width] of [["light", 1366], ["dark", 390]] as const) {
    const { page, quiet } = await open(bench, "live/#at=2,1", { scheme, size: { width, height: 844 } });
    for (const view of VIEWS) {
      await page.goto(`${page.url().split("#")[0]}#view=${view}&at=2,1&pins=0.0,1.1&difference=1`);
      await page.waitForSelector(`.${view}-view`);
      await settled(page);
      assert.deepEqual(await axeFaults(page, tags), [], `${view}, ${scheme}`);
    }
    await page.keyboard.press("?");
    assert.deepEqual(await axeFaults(page, tags), [], "help");
    quiet();
    await page.close();
  }
});

test("help defines every metric, the marks and the files", async () => {
  const { page, quiet } = await open(bench, "small/");
  await page.keyboard.press("?");
  const terms = await page.locator("dialog th").allTextContents();
  for (const term of ["entropy", "effective keys", "top1", "sink", "distance", "local", "self", "previous", "next", "AER argmax", "hatched", "checks", "NPZ", "Backspace", "contribution", "change", "effect", "i", "z"])
    assert.ok(terms.includes(term), term);
  await page.keyboard.press("Escape");
  assert.match((await page.locator(".count").textContent()) ?? "", /^8 of 8 heads\. Each picture is a head: a row for each query/);
  await page.keyboard.press("t");
  assert.match((await page.getByRole("button", { name: "sink", exact: true }).getAttribute("title")) ?? "", /^mean weight on the first key/);
  quiet();
});

test("what an address names in vain is told", async () => {
  const { page, quiet } = await open(bench, "small/#view=zzz&map=999&head=1");
  const alert = page.getByRole("alert");
  assert.equal(await alert.textContent(), "The address has view=zzz, map=999: there is no such thing here, and the rest of it is shown.");
  await page.goto(`${page.url().split("#")[0]}#view=head&map=1`);
  await page.waitForSelector(".head-view");
  assert.equal(await alert.count(), 0);
  assert.equal(await hashOf(page), "#view=head&map=1");
  quiet();
});

for (const size of [{ width: 390, height: 844 }, { width: 683, height: 384 }]) {
  test(`weights are reached on ${size.width} × ${size.height}, where bars scroll away`, async () => {
    const { page, quiet } = await open(bench, "live/#view=head&at=2,1", { size, touch: true });
    for (const [view, weight] of [["head", ".plot"], ["grid", ".thumb canvas"], ["lines", ".stage canvas"]] as const) {
      await page.goto(`${page.url().split("#")[0]}#view=${view}&at=2,1`);
      await page.waitForSelector(`.${view}-view`);
      await settled(page);
      const first = page.locator(weight).first();
      if (size.height > 800) assert.ok(((await first.boundingBox())?.y ?? 1e9) < size.height - 100, `${view}: the first screen`);
      await first.evaluate((node) => node.scrollIntoView({ block: "start" }));
      const box = await first.boundingBox();
      assert.ok(box && box.y >= -1 && box.y + Math.min(box.height, 300) <= size.height, `${view}: ${box?.y}`);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    }
    quiet();
  });
}

test("the tip lies inside of its map, wherever the pointer is", async () => {
  for (const width of [1366, 390]) {
    const { page, quiet } = await open(bench, "long/#view=head", { size: { width, height: 844 } });
    await settled(page);
    const plot = await plotBox(page);
    for (const [x, y] of [[2, 2], [0.99 * plot.width, 2], [2, 0.99 * plot.height], [0.99 * plot.width, 0.99 * plot.height], [plot.width / 2, plot.height / 2]]) {
      await page.mouse.move(plot.x + x, plot.y + y);
      await settled(page);
      const [tip, panel] = [await page.locator(".tip").boundingBox(), await page.locator(".panel").boundingBox()];
      assert.ok(tip && panel);
      assert.ok(tip.x >= panel.x && tip.x + tip.width <= panel.x + panel.width + 0.5, `${width}: across at ${x}, ${y}`);
      assert.ok(tip.y >= panel.y && tip.y + tip.height <= panel.y + panel.height + 0.5, `${width}: down at ${x}, ${y}`);
    }
    quiet();
    await page.close();
  }
});

test("a title takes a second line before it is cut, and NaN has one colour", async () => {
  const { page, quiet } = await open(bench, "live/#view=head", { size: { width: 1366, height: 768 } });
  const text = "The animal did not cross the street because it was too tired .";
  await page.locator(".rerun textarea").fill(text);
  await page.keyboard.press("Enter");
  await page.waitForFunction((text) => document.querySelector("h1")?.textContent === text, text);
  const { lines, cut } = await page.locator("h1").evaluate((node) => ({
    lines: Math.round(node.clientHeight / (1.25 * 14)),
    cut: node.scrollHeight > node.clientHeight + 2,
  }));
  assert.deepEqual([lines, cut], [2, false]);
  quiet();
  const broken = await open(bench, "broken/");
  await settled(broken.page);
  const colour = (selector: string, property: "color" | "borderTopColor") =>
    broken.page.locator(selector).first().evaluate((node, property) => getComputedStyle(node)[property], property);
  assert.equal(await colour(".part.broken:visible", "color"), await colour(".badge.broken", "borderTopColor"));
  broken.quiet();
});
