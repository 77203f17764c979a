import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { type Bench, hashOf, open, settled, start } from "./harness.ts";
import { MOST_BYTES } from "./collections.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

const box = ".rerun textarea";

async function run(page: Page, text: string): Promise<void> {
  await page.locator(box).fill(text);
  await page.keyboard.press("Enter");
  await page.waitForFunction(
    (text) => document.querySelector("h1")?.textContent === text && !document.querySelector("[aria-busy]"),
    text,
  );
  await settled(page);
}

const panes = (page: Page) => page.locator(".pane h2").allTextContents();

test("another sentence is read, and compared with the one before", async () => {
  const { page, quiet } = await open(bench, "live/#view=head&map=1&head=2");
  assert.equal(await page.locator(box).inputValue(), "it was late .");
  assert.equal(await page.locator(".chooser *").count(), 0);
  await page.locator(".plot").press("e");
  await run(page, "it is late .");
  assert.equal(await hashOf(page), "#view=head&map=1&head=2&text=it%20is%20late%20.");
  assert.equal(await page.evaluate(() => document.activeElement?.tagName), "TEXTAREA");
  await page.keyboard.press("Escape");
  await page.keyboard.press("b");
  await page.waitForSelector(".pane");
  await settled(page);
  assert.deepEqual(await panes(page), [
    "now · h.1 · head 2",
    "before · h.1 · head 2",
    "now − before · h.1 · head 2",
  ]);
  assert.equal(await page.locator(".differing").textContent(), "Not the same words: token 1 is | was.");
  await page.keyboard.press("ArrowRight");
  await settled(page);
  assert.equal((await panes(page))[1], "before · h.1 · head 3");
  assert.match(await hashOf(page), /head=3.*against=1/);
  await run(page, "it is late , is it not ?");
  assert.deepEqual(await panes(page), ["now · h.1 · head 3", "before · h.1 · head 3"]);
  assert.match((await page.locator(".differing").textContent()) ?? "", /The sizes differ, 8 × 8 and 4 × 4/);
  assert.equal(await page.getByRole("button", { name: "A − B" }).isDisabled(), true);
  await page.locator(".chooser button").click();
  await page.waitForFunction(() => !location.hash.includes("against"));
  quiet();
});

test("a text that cannot be read leaves everything as it is", async () => {
  const { page, errors } = await open(bench, "live/#view=head");
  const title = await page.locator("h1").textContent();
  await page.locator(box).fill("fail at this");
  await page.getByRole("button", { name: "Run" }).click();
  await page.waitForSelector(".message.failed");
  assert.equal(await page.getByRole("alert").textContent(), "the model cannot <b>read</b> this");
  assert.equal(await page.locator(box).inputValue(), "fail at this");
  await page.locator(box).fill("é".repeat(MOST_BYTES));
  await page.locator(box).press("Enter");
  await page.getByText("the text has 4,000 bytes; at most 2,000 are read").waitFor();
  assert.equal(await page.locator("h1").textContent(), title);
  assert.equal(await page.locator(".head-view").count(), 1);
  assert.deepEqual(
    errors.filter((error) => !error.includes("400")),
    [],
  );
});

test("a run that is cancelled leaves everything as it is", async () => {
  const { page, quiet } = await open(bench, "live/#view=head");
  const title = await page.locator("h1").textContent();
  let go: () => void = () => undefined;
  bench.served.hold = new Promise((resolve) => (go = resolve));
  await page.locator(box).fill("never seen");
  await page.locator(box).press("Enter");
  await page.getByText("running the model …").waitFor();
  assert.equal(await page.locator(".run").textContent(), "Cancel");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.press("x");
  assert.equal(await page.locator(box).inputValue(), "never seen");
  await page.keyboard.press("Escape");
  await page.getByText("cancelled").waitFor();
  assert.equal(await page.locator(".run").textContent(), "Run");
  assert.equal(await page.locator("h1").textContent(), title);
  bench.served.hold = undefined;
  go();
  quiet();
});

test("two tabs never disturb each other, and each run has its own address", async () => {
  const one = await open(bench, "live/#view=head");
  await run(one.page, "the first tab reads this");
  const two = await open(bench, "live/#view=head");
  await run(two.page, "the second tab reads this");
  await run(two.page, "and this , too");
  // Weights that the first tab has not asked for so far, and its own text before.
  await one.page.locator(".regard-explorer").press("k");
  await settled(one.page);
  await one.page.locator(".regard-explorer").press("b");
  await one.page.waitForSelector(".pane");
  await settled(one.page);
  assert.deepEqual(await one.page.locator("h1").allTextContents(), ["the first tab reads this"]);
  assert.equal((await panes(one.page)).length, 2, "beside the text that this tab had before");
  assert.equal(await one.page.locator(".status").textContent(), "");
  const reruns = () => bench.served.asked.filter((path) => path.endsWith("/rerun")).length;
  const before = reruns();
  const { page, quiet } = await open(bench, `live/${await hashOf(one.page)}`);
  await page.waitForFunction(() => document.querySelector("h1")?.textContent === "the first tab reads this");
  assert.equal(reruns(), before, "what is kept is not read again");
  for (const { quiet: calm } of [one, two]) calm();
  quiet();
});

test("several lines, and what an input method takes for itself", async () => {
  const { page, quiet } = await open(bench, "live/");
  await page.locator(box).fill("one");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("two");
  await page.evaluate(() => {
    const event = new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true });
    document.querySelector("textarea")?.dispatchEvent(event);
  });
  assert.equal(await page.locator("[aria-busy]").count(), 0);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("h1")?.textContent === "one two");
  assert.equal(await page.locator(box).getAttribute("rows"), "2");
  quiet();
});

test("through the steps of a training", async () => {
  const { page, quiet } = await open(bench, "steps/#view=head&map=1&head=1");
  await settled(page);
  assert.equal(await page.locator(box).isVisible(), false);
  const chosen = () => page.locator(".chooser select").first().inputValue();
  await page.keyboard.press(".");
  await page.getByText("step 100 · h.1 · head 1").first().waitFor();
  assert.equal(await chosen(), "1");
  const slider = page.locator(".collection input[type=range]");
  assert.equal(await slider.getAttribute("aria-valuetext"), "step 100");
  await slider.focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  await page.getByText("step 300 · h.1 · head 1").first().waitFor();
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLInputElement).type), "range");
  await page.waitForFunction(() => location.hash === "#view=head&map=1&head=1&atlas=3");
  assert.equal(await page.evaluate(() => history.length), 2, "sliding is not kept step by step");
  await page.locator(".plot").press(".");
  assert.equal(await chosen(), "3");
  quiet();
});

test("any two steps, what one has more than the other, and other words", async () => {
  const { page, quiet } = await open(bench, "steps/#view=head&map=1&head=1&atlas=2");
  await page.getByLabel("Compare with").selectOption("step 0");
  await page.waitForSelector(".pane");
  await settled(page);
  assert.deepEqual(await panes(page), [
    "step 200 · h.1 · head 1",
    "step 0 · h.1 · head 1",
    "step 200 − step 0 · h.1 · head 1",
  ]);
  assert.equal(await page.locator(".differing").isVisible(), false);
  await page.locator(".plot").nth(2).hover({ position: { x: 12, y: 150 } });
  const told = page.locator(".pane").nth(2).locator(".tip strong");
  await page.waitForFunction(() => {
    const tip = document.querySelectorAll(".pane")[2].querySelector(".tip strong");
    return /^-?\d/.test(tip?.textContent ?? "");
  });
  const where = /query (\d+).*key (\d+)/.exec((await page.locator(".pane").nth(2).locator(".tip").textContent()) ?? "");
  const weight = bench.served.atlas("steps").maps[1].weight;
  const [row, column] = [Number(where?.[1]), Number(where?.[2])];
  // The heads of step 200 are those of step 0, two further.
  const expected = Math.fround(weight(3, row, column)) - Math.fround(weight(1, row, column));
  assert.ok(Math.abs(Number(await told.textContent()) - expected) < 1e-4);
  await page.keyboard.press(".");
  await page.getByText("step 300 · h.1 · head 1").first().waitFor();
  await page.getByText("Not the same words: token 3 but | and, 4 he | she.").waitFor();
  await page.locator(".plot").nth(2).focus();
  await settled(page);
  const plot = await page.locator(".plot").nth(2).boundingBox();
  assert.ok(plot);
  // Square cells, twelve across, in the middle.
  const side = plot.width / 12;
  await page.mouse.move(plot.x + 3.5 * side, plot.y + plot.height / 2 - 1.5 * side);
  await page.getByText("key 3  but | and").waitFor();
  assert.equal(await page.locator(".pane").nth(2).locator(".tip-token").first().textContent(), "query 4  he | she");
  await page.keyboard.press(",");
  await page.keyboard.press(",");
  await page.getByText("step 100 − step 0").waitFor();
  await page.goBack();
  await page.waitForSelector(".head-view");
  await page.reload();
  await page.waitForSelector(".head-view");
  const state = "view=compare&map=1&head=1&atlas=1&against=0&difference=1";
  await page.goto(`${bench.served.address}/steps/?renderer=canvas&b#${state}`);
  await page.waitForSelector(".pane");
  assert.equal((await panes(page))[2], "step 100 − step 0 · h.1 · head 1");
  quiet();
});

test("one atlas shows no bar, and an atlas that went is told", async () => {
  const { page, quiet } = await open(bench, "small/");
  assert.equal(await page.locator(".collection").isVisible(), false);
  quiet();
  const { page: old } = await open(bench, "live/#view=head");
  const body = '{"error": "this atlas is not kept any more"}';
  for (const asked of ["pooled", "weights"])
    await old.route(`**/${asked}?*`, (route) => route.fulfill({ status: 410, contentType: "application/json", body }));
  await old.keyboard.press("ArrowRight");
  await old.getByText("The source says: this atlas is not kept any more").waitFor();
});

for (const scheme of ["light", "dark"] as const) {
  test(`words of the bar can be read in ${scheme}`, async () => {
    const { page, quiet } = await open(bench, "live/", { scheme });
    await run(page, `it is ${scheme} .`);
    const ratios = await page.evaluate(() => {
      const shown = document.querySelectorAll(".rerun textarea, .run, .chooser select, .chooser button, .chooser span");
      return [...shown].map((of) => {
        const light = (colour: string) => {
          const parts = (colour.match(/[\d.]+/g) ?? []).slice(0, 3).map((part) => Number(part) / 255);
          const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        let below: Element | null = of;
        while (below && /, 0\)$|transparent/.test(getComputedStyle(below).backgroundColor)) below = below.parentElement;
        const pair = [light(getComputedStyle(of).color), light(getComputedStyle(below ?? of).backgroundColor)];
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
      });
    });
    assert.ok(ratios.length >= 4 && ratios.every((ratio) => ratio >= 4.5), String(ratios));
    quiet();
  });
}

test("the address holds the sentence: another page that opens it runs the model on it", async () => {
  const fresh = await start(); // a server that has read one sentence alone
  try {
    const { page, quiet } = await open(fresh, "live/#view=head&map=1&head=2&at=3,1&text=she%20has%20left%20.");
    await page.waitForFunction(() => document.querySelector("h1")?.textContent === "she has left .");
    await settled(page);
    assert.equal(await page.locator(box).inputValue(), "she has left .");
    assert.equal(await hashOf(page), "#view=head&map=1&head=2&at=3,1&text=she%20has%20left%20.");
    assert.equal(await page.locator("aside h2").textContent(), "now · h.1 · head 2");
    const runs = () => fresh.served.asked.filter((url) => url.endsWith("rerun")).length;
    assert.equal(runs(), 1);
    await run(page, "he stays .");
    assert.match(await hashOf(page), /&text=he%20stays%20\.$/);
    await page.goBack(); // the sentence before is there still: the model need not run
    await page.waitForFunction(() => document.querySelector("h1")?.textContent === "she has left .");
    assert.equal(runs(), 2);
    const other = await open(fresh, "live/#text=he%20stays%20.");
    await settled(other.page);
    assert.equal(await other.page.locator("h1").textContent(), "he stays .");
    assert.equal(runs(), 2);
    quiet();
  } finally {
    await fresh.close();
  }
});
