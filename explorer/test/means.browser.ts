import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { figure } from "../src/text.ts";
import { type Bench, hashOf, open, plotPixels, settled, shapesOf, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

test("the mean of a layer, of all layers and of pinned heads, in all views of one head", async () => {
  const { page, quiet } = await open(bench, "small/#view=head&map=1&head=2&at=40,37&pins=0.1,1.3");
  await settled(page);
  const { maps } = bench.served.atlas("small");
  const value = (heads: [number, number][]) =>
    figure(Math.fround(heads.reduce((sum, [map, head]) => sum + maps[map].weight(head, 40, 37), 0) / heads.length));
  const layer = [0, 1, 2, 3].map((head): [number, number] => [1, head]);
  const told = async () => {
    await settled(page);
    return page.locator(".kept .kept-value").textContent();
  };
  await page.keyboard.press("m");
  assert.equal(await told(), value(layer));
  assert.equal(await page.locator("aside h2").textContent(), "mean of 4 heads · h.1");
  assert.equal(await page.locator(".level").textContent(), "exact weights");
  assert.equal(await page.locator("aside dl").count(), 0, "the metrics of one head are not those of a mean");
  await page.keyboard.press("m");
  assert.equal(await told(), value([...layer, ...layer.map(([, head]): [number, number] => [0, head])]));
  assert.equal(await page.locator("aside h2").textContent(), "mean of 8 heads · 2 layers");
  for (const [key, selector] of [["l", ".lines-view"], ["v", ".text-view"], ["h", ".head-view"]]) {
    await page.keyboard.press(key);
    await page.waitForSelector(selector);
    assert.equal(await told(), value([...layer, ...layer.map(([, head]): [number, number] => [0, head])]), selector);
    assert.match((await page.locator("main").textContent()) ?? "", /mean of 8 heads · 2 layers/);
  }
  await page.getByTitle(/^one head, or the mean/).locator("select").selectOption("pins");
  assert.equal(await told(), value([[0, 1], [1, 3]]));
  assert.match(await hashOf(page), /view=head&map=1&head=2.*/);
  await page.keyboard.press("ArrowRight");
  await settled(page);
  assert.equal(await page.locator("aside h2").textContent(), "h.1 · head 3", "another head alone");
  quiet();
});

test("an address opens on a mean, touch chooses it, and long maps have none", async () => {
  const { page, quiet } = await open(bench, "cross/#view=lines&mean=all&top=1&threshold=0", { touch: true, size: { width: 390, height: 844 } });
  await settled(page);
  assert.equal(await page.locator(".about h2").textContent(), "mean of 4 heads · decoder.0.cross");
  assert.match((await page.locator(".level").textContent()) ?? "", /^17 lines .* 100 % of the weight/);
  await page.getByRole("button", { name: "Heads" }).tap();
  await page.locator("button.thumb").nth(2).tap();
  await settled(page);
  assert.equal(await page.locator("aside h2").textContent(), "decoder.0.cross · head 2");
  quiet();
  const long = await open(bench, "long/#view=head&mean=all");
  await settled(long.page);
  assert.equal(await long.page.locator("aside h2").textContent(), "long.0.attention · head 0");
  assert.equal(await long.page.getByTitle(/^one head, or the mean/).count(), 0);
  long.quiet();
});

test("a translation opens on the mean of its cross-attention, with rows by what is said or was read", async () => {
  const { page, quiet } = await open(bench, "forced/");
  await settled(page);
  assert.equal(await page.locator("aside h2").textContent(), "mean of 6 heads · 2 layers");
  assert.equal(await hashOf(page), "");
  const rows = async () => {
    await settled(page);
    return (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" && shape.anchor === "end" ? [shape.text] : []));
  };
  const said = await rows();
  for (const token of ["▁Le", "▁chat", "</s>", "target ↓"]) assert.ok(said.includes(token), token);
  assert.ok(!said.includes("<s>"));
  await page.getByTitle(/^a row by the token that is said/).locator("select").selectOption("read");
  const read = await rows();
  for (const token of ["<s>", "▁Le", "read ↓"]) assert.ok(read.includes(token), token);
  assert.ok(!read.includes("</s>"));
  assert.match(await page.evaluate(() => new Promise<string>((done) => setTimeout(() => done(location.hash), 400))), /view=head&map=2&mean=all&rows=read/);
  await page.keyboard.press("Escape");
  await page.waitForSelector(".grid-view");
  assert.match(await hashOf(page), /view=grid|map=2/);
  await page.reload();
  await page.waitForSelector(".grid-view");
  // Of self-attention there is nothing to choose.
  await page.goto(`${page.url().split("#")[0]}#view=head&map=1`);
  await page.waitForSelector(".head-view");
  await settled(page);
  assert.equal(await page.getByTitle(/^a row by the token that is said/).count(), 0);
  quiet();
});

test("the lines of pinned heads have a colour and a dash each, and a legend", async () => {
  const { page, quiet } = await open(bench, "cross/#view=lines&pins=0.0,0.1,0.3&top=1&threshold=0&mean=each");
  await settled(page);
  assert.equal(await page.locator(".about h2").textContent(), "3 pinned heads");
  assert.equal(await page.locator(".level").textContent(), "51 lines of 3 heads · queries 0–16, keys 0–16");
  const curves = (await shapesOf(page)).flatMap((shape) => (shape.kind === "curve" ? [shape] : []));
  assert.equal(curves.length, 51);
  assert.equal(new Set(curves.map(({ stroke }) => stroke)).size, 3);
  assert.equal(new Set(curves.map(({ dash }) => String(dash))).size, 3);
  const texts = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
  for (const head of [0, 1, 3]) assert.ok(texts.includes(`decoder.0.cross · head ${head}`), `${head}`);
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("[data-save=csv]")]);
  const lines = readFileSync(await download.path(), "utf8").trim().split("\r\n");
  assert.equal(lines.length, 52);
  await page.keyboard.press("h"); // in the other views the chosen head is shown
  await settled(page);
  assert.equal(await page.locator("aside h2").textContent(), "decoder.0.cross · head 0");
  quiet();
});

test("a mean is drawn where the source gives all coarse levels at once", async () => {
  const { page, quiet } = await open(bench, "short/#view=head&mean=layer&map=3&scale=linear");
  await settled(page);
  assert.equal(await page.locator("aside h2").textContent(), "mean of 12 heads · h.3");
  const { data } = await plotPixels(page);
  const colours = new Set<number>();
  for (let at = 0; at < data.length; at += 4 * 97) colours.add(data.readUInt32LE(at));
  assert.ok(colours.size > 20, `${colours.size} colours`);
  quiet();
});
