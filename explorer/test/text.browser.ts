import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { axeFaults, withoutAxe } from "./chromium.ts";
import { type Bench, hashOf, open, settled, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

/** What is told of each token: "0: 0.2500". */
const told = async (page: Page, side = "") => {
  await settled(page);
  return page.locator(`.running${side && `[data-side=${side}]`} .token`).evaluateAll((all) => all.map((token) => (token as HTMLElement).title));
};
const parts = (page: Page) =>
  page.locator(".token").evaluateAll((all) => all.map((token) => (token as HTMLElement).style.getPropertyValue("--part")));

test("a text is shaded by what a kept token attends to, and without sinks by what is left", async () => {
  const { page, quiet } = await open(bench, "special/#view=text");
  await settled(page);
  assert.equal(((await page.locator(".running").textContent()) ?? "").trim(), "[CLS] unseen cats sleep [SEP]");
  assert.match((await page.locator(".shading").textContent()) ?? "", /press a token to keep it/);
  await page.locator(".token", { hasText: "cats" }).click();
  assert.deepEqual(await told(page), ["0: 0.2500", "1: 0.0000", "2: 0.0000", "3: 0.5000", "4: 0.0000", "5: 0.2500"]);
  assert.deepEqual(await parts(page), ["71%", "0%", "0%", "100%", "0%", "71%"], "the square root of the part of the greatest");
  assert.match(await hashOf(page), /view=text/);
  await page.getByRole("button", { name: "Hide sinks" }).click();
  assert.deepEqual(await told(page), ["0: hidden", "1: 0.0000", "2: 0.0000", "3: 1.0000", "4: 0.0000", "5: hidden"]);
  assert.match(
    (await page.locator(".shading").textContent()) ?? "",
    /shaded by the weight that the kept token gives\. Hidden: \[CLS\], \[SEP\], 50\.0 % of the weight; the rest of each row is shown as 100 %\.$/,
  );
  // Several: the mean of the rows of "un" and "##seen".
  await page.getByRole("button", { name: "Several" }).click();
  await page.locator(".token").nth(1).click();
  await page.locator(".token").nth(2).click();
  await page.locator(".token").nth(3).click();
  assert.deepEqual(await told(page), ["0: hidden", "1: 0.5000", "2: 0.5000", "3: 0.0000", "4: 0.0000", "5: hidden"]);
  assert.deepEqual(await page.locator(".kept .chip").count(), 2);
  quiet();
});

test("the other direction: who attends to what is kept", async () => {
  const { page, quiet } = await open(bench, "special/#view=text&at=3,");
  await settled(page);
  await page.getByLabel("Of what is kept").selectOption("key");
  assert.deepEqual(await told(page), ["0: 0.1250", "1: 0.0000", "2: 0.0000", "3: 0.5000", "4: 0.0000", "5: 0.1250"]);
  assert.match(await page.evaluate(() => new Promise<string>((done) => setTimeout(() => done(location.hash), 400))), /at=,3&.*direction=key/);
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("[data-save=csv]")]);
  const lines = readFileSync(await download.path(), "utf8").trim().split("\r\n");
  assert.equal(lines.length, 7);
  assert.match(lines[4], /^3,"?cats"?,0\.5$/);
  quiet();
});

test("touch and keys keep tokens; a pair from elsewhere is framed", async () => {
  const { page, quiet } = await open(bench, "special/#view=text&at=3,4", { touch: true, size: { width: 390, height: 844 } });
  await settled(page);
  const framed = () => page.locator(".token[aria-pressed=true]").allTextContents();
  assert.deepEqual(await framed(), ["cats", "sleep"]);
  await page.locator(".token").nth(1).tap();
  assert.deepEqual(await framed(), ["un", "sleep"]);
  await page.locator(".token").first().focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  assert.deepEqual(await framed(), ["seen", "sleep"]);
  await page.keyboard.press("Escape");
  await page.waitForSelector(".grid-view");
  await page.keyboard.press("v");
  assert.deepEqual(await framed(), ["seen", "sleep"]);
  quiet();
});

test("of a translation there are two texts, and each shades the other", async () => {
  const { page, quiet } = await open(bench, "cross/#view=text&head=3");
  await settled(page);
  assert.deepEqual(await page.locator(".texts h3").allTextContents(), ["target", "source"]);
  await page.locator("[data-side=query] .token").nth(4).click();
  const { weight } = bench.served.atlas("cross").maps[0];
  const shown = (await told(page, "key")).map((title) => Number(title.split(": ")[1]));
  shown.forEach((value, at) => assert.ok(Math.abs(value - weight(3, 4, at)) < 6e-5 * Math.max(1, value), `${at}`));
  await page.locator("[data-side=key] .token").nth(4).click();
  const given = (await told(page, "query")).map((title) => Number(title.split(": ")[1]));
  given.forEach((value, at) => assert.ok(Math.abs(value - weight(3, at, 4)) < 6e-5, `${at}`));
  quiet();
});

test("Korean wraps between words, and a long text is shown in parts", async () => {
  const { page, quiet } = await open(bench, "live/#view=text", { size: { width: 390, height: 844 } });
  const text = "그 동물은 너무 지쳐서 길을 건너지 않았다 그리고 나무 아래에서 오랫동안 쉬었다";
  await page.locator(".rerun textarea").fill(text);
  await page.keyboard.press("Enter");
  await page.waitForFunction((text) => document.querySelector("h1")?.textContent === text, text);
  await settled(page);
  assert.equal(((await page.locator(".running").textContent()) ?? "").trim(), text);
  const broken = await page.locator(".token").evaluateAll((all) => all.filter((token) => token.getClientRects().length > 1).length);
  assert.equal(broken, 0);
  const box = await page.locator(".running").boundingBox();
  assert.ok(box && box.height > 60 && box.width <= 390);
  quiet();
  const long = await open(bench, "long/#view=head&at=12000,");
  await settled(long.page);
  await long.page.keyboard.press("v");
  await settled(long.page);
  assert.equal(await long.page.locator(".token").count(), 1000);
  assert.match((await long.page.locator(".bar").last().textContent()) ?? "", /tokens 11,500–12,499 of 100,000/);
  await long.page.keyboard.press("PageDown");
  await settled(long.page);
  assert.match((await long.page.locator(".bar").last().textContent()) ?? "", /tokens 12,500–13,499 of 100,000/);
  long.quiet();
});

test("axe finds nothing in a shaded text", { skip: withoutAxe }, async () => {
  for (const scheme of ["light", "dark"] as const) {
    const { page, quiet } = await open(bench, "special/#view=text&at=3,&hide=1", { scheme });
    await settled(page);
    assert.deepEqual(await axeFaults(page), [], scheme);
    quiet();
    await page.close();
  }
});
