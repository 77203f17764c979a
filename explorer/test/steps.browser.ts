/** The live page of steps in Chromium; tests/explorer/test_steps_in_chromium.py serves it at STEPS, and writes STEPS_FILE. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import type { Browser, Page } from "playwright-core";
import { axeFaults, launch, withoutAxe } from "./chromium.ts";

const served = process.env.STEPS ?? "";
const file = process.env.STEPS_FILE ?? "";
const skip = served && file ? false : "STEPS names no server: tests/explorer/test_steps_in_chromium.py does";
const LUONG = "mechanism=dot&sentence=나는+학생이다&word=4";

let browser: Browser;
before(async () => {
  if (!skip)
    browser = await launch();
});
after(() => browser?.close());

interface Opened {
  page: Page;
  /** Fails if the page said anything on its console, threw, or asked anyone but its own server. */
  quiet(): void;
}

async function open(hash: string, look: { width?: number; scheme?: "light" | "dark"; stored?: boolean } = {}) {
  const address = look.stored ? pathToFileURL(file).href : served.split("#")[0];
  const page = await browser.newPage({
    viewport: { width: look.width ?? 1366, height: 768 },
    colorScheme: look.scheme ?? "light",
  });
  const faults: string[] = [];
  page.on("console", (message) => faults.push(message.text()));
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(address) && !/^(data|blob):/.test(request.url())) faults.push(request.url());
  });
  await page.goto(hash ? `${address}#${hash}` : address);
  await settled(page);
  return { page, quiet: () => assert.deepEqual(faults, []) } satisfies Opened;
}

async function settled(page: Page): Promise<void> {
  await page.locator(".tables table, .message p").first().waitFor();
  await page.locator("#regard-steps:not([aria-busy])").waitFor();
}

/** Each cell of a step, with what it was before in front of a bar. */
async function cells(page: Page, key: string): Promise<string[]> {
  return page.locator(`[id="step-${key}"] tbody td:not(.more)`).evaluateAll((all) =>
    all.map((td) => [td.querySelector("del")?.textContent, td.childNodes[0]?.textContent].filter(Boolean).join("|")),
  );
}

/** The words of titles and of the heads of tables that stand on two lines. */
const brokenWords = (page: Page) =>
  page.locator("th, h1, h2, h3, button, label").evaluateAll((all) =>
    all.flatMap((one) => {
      const broken: string[] = [];
      const texts = document.createTreeWalker(one, NodeFilter.SHOW_TEXT);
      for (let node = texts.nextNode(); node; node = texts.nextNode())
        for (const word of (node.textContent ?? "").matchAll(/[가-힣]+/g)) {
          const range = document.createRange();
          range.setStart(node, word.index);
          range.setEnd(node, word.index + word[0].length);
          if (range.getClientRects().length > 1) broken.push(word[0]);
        }
      return broken;
    }),
  );

test("a masked word changes its weight, all that follows, and the next word", { skip }, async () => {
  const { page, quiet } = await open(LUONG);
  assert.deepEqual(await cells(page, "weights"), ["0.000", "1", "1"]);
  await page.getByRole("checkbox", { name: "attend to 학생이다" }).uncheck();
  await settled(page);
  assert.deepEqual(await cells(page, "weights"), ["0.000|1", "1|0", "1"]);
  assert.deepEqual(await cells(page, "masked_scores"), ["-9.811", "2.728|-∞"]);
  assert.equal(await page.locator("#step-decoder_state mark").count(), 0);
  assert.equal(await page.locator("#step-concatenated mark").count(), 3);
  assert.ok((await page.locator("#step-attentional mark").count()) > 3);
  assert.match((await page.locator(".next").textContent()) ?? "", /student 0\.910→\w+ 0\.\d+the next word changes/);
  assert.match(page.url(), /change=flip%3D2/);
  await page.getByRole("button", { name: "Undo all changes" }).click();
  await settled(page);
  assert.equal(await page.locator("mark").count(), 0);
  quiet();
});

test("a score is dragged by the keyboard", { skip }, async () => {
  const { page, quiet } = await open(LUONG);
  const slider = page.getByRole("slider", { name: "add to the score of 나는" });
  await slider.focus();
  for (let step = 0; step < 4; step += 1) await page.keyboard.press("ArrowRight");
  await settled(page);
  assert.deepEqual(await cells(page, "bias"), ["0|2", "0"]);
  assert.equal(await slider.evaluate((one) => document.activeElement === one), true);
  assert.match(page.url(), /add%3D1%3A2/);
  quiet();
});

test("score and 1/√d are switched", { skip }, async () => {
  const { page, quiet } = await open("mechanism=scaled_dot&sentence=I+am+tired.&word=3");
  await page.getByRole("checkbox", { name: "divide by √d" }).uncheck();
  await settled(page);
  assert.match((await page.locator(".status").textContent()) ?? "", /No longer computed: 2\. Scores times the scale/);
  assert.equal(await page.locator("#step-scaled_scores").count(), 0);
  await page.getByRole("button", { name: "Undo all changes" }).click();
  await page.getByLabel("Mechanism").selectOption("multi_head");
  await settled(page);
  assert.equal(await page.locator("#step-weights tbody tr").count(), 6);
  await page.getByLabel("Mechanism").selectOption("additive");
  await settled(page);
  assert.equal(await page.getByRole("textbox", { name: "Sentence" }).inputValue(), "나는 학생이다");
  await page.locator(".what-if select").selectOption("dot");
  await settled(page);
  assert.ok((await page.locator("#step-scores mark").count()) > 0);
  quiet();
});

test("the language is switched without another request, and a mistake is said", { skip }, async () => {
  const { page } = await open(LUONG);
  const asked: string[] = [];
  page.on("request", (request) => asked.push(request.url()));
  await page.getByRole("button", { name: "한국어" }).click();
  const titles = await page.locator(".numbered h2").allTextContents();
  assert.deepEqual(
    titles.map((title) => title.slice(0, 4)),
    ["1어텐션", "2어텐션", "3문맥 ", "4연결", "5어텐셔", "6예측:"],
  );
  assert.equal(await page.evaluate(() => document.documentElement.lang), "ko");
  assert.deepEqual(asked, []);
  await page.getByRole("textbox", { name: "문장" }).fill("I am tired.");
  await page.keyboard.press("Enter");
  await page.locator(".failed [role=alert] p").waitFor();
  assert.match((await page.getByRole("alert").textContent()) ?? "", /has no Korean letters.*write it in Korean/);
});

test("a class predicts: Space reveals the next number, Enter its table", { skip }, async () => {
  const { page, quiet } = await open(LUONG);
  await page.getByRole("button", { name: "Predict, then reveal" }).click();
  assert.equal(await page.locator(".line").nth(1).locator(".token").nth(3).textContent(), "?");
  assert.equal(await page.locator(".next .word").textContent(), "?");
  assert.equal(await page.locator("#step-annotations .cover").count(), 0);
  await page.keyboard.press("Space");
  assert.deepEqual(await cells(page, "scores"), ["-9.811", "?"]);
  await page.keyboard.press("Enter");
  assert.deepEqual(await cells(page, "scores"), ["-9.811", "2.728"]);
  assert.equal(await page.evaluate(() => document.activeElement?.closest("section")?.id), "step-exponentials");
  await page.locator("#step-weights .cover").nth(1).click();
  assert.equal((await cells(page, "weights"))[1], "1");
  await page.getByRole("button", { name: "Reveal this table: 6. Prediction" }).click();
  assert.match((await page.locator(".next").textContent()) ?? "", /student/);
  await page.getByRole("button", { name: "Cover again" }).click();
  assert.equal(await page.locator("#step-scores .cover").count(), 2);
  await page.getByRole("button", { name: "Reveal all" }).click();
  assert.equal(await page.locator(".cover").count(), 0);
  quiet();
});

test("predictions are checked one after another and counted", { skip }, async () => {
  const { page, quiet } = await open("mechanism=example:scaled-dot-product&predict=1");
  const field = page.getByLabel("Your prediction");
  await field.fill("2");
  await page.keyboard.press("Enter");
  assert.deepEqual((await cells(page, "scores")).slice(0, 3), ["2", "?", "?"]);
  assert.equal(await page.locator(".hits").textContent(), "1 / 1 right");
  await page.keyboard.type("7/2"); // the field has kept the focus
  await page.keyboard.press("Enter");
  assert.equal(await page.locator(".hits").textContent(), "1 / 2 right");
  assert.deepEqual(await page.locator("#step-scores td").evaluateAll((all) => all.slice(1, 3).map((td) => td.className)), [
    "hit",
    "miss fresh",
  ]);
  assert.match((await page.locator(".status").textContent()) ?? "", /: not as predicted\. 1 \/ 2 right/);
  await page.keyboard.press("Enter"); // nothing was predicted, and nothing is revealed
  assert.equal((await cells(page, "scores"))[2], "?");
  await page.getByRole("button", { name: "Cover again" }).click();
  assert.equal(await page.locator(".hits").count(), 0);
  quiet();
});

test("without a server it has the words and single changes, and says what it has not", { skip }, async () => {
  const { page, quiet } = await open("", { stored: true });
  await page.getByRole("checkbox", { name: /학생이다/ }).uncheck();
  await settled(page);
  assert.match((await page.locator(".next").textContent()) ?? "", /다음 단어가 바뀝니다/);
  await page.getByRole("button", { name: "1: I" }).click();
  await settled(page);
  assert.match((await page.locator(".next").textContent()) ?? "", /^다음 단어I /);
  assert.equal(await page.getByRole("textbox").getAttribute("readonly"), "");
  await page.goto(`${page.url().split("#")[0]}#${LUONG}&change=flip%3D1&change=flip%3D2`);
  await page.locator(".failed [role=alert] p").waitFor();
  assert.match((await page.getByRole("alert").textContent()) ?? "", /not computed that.*--serve/);
  quiet();
});

const PAGES = [
  `lang=ko&${LUONG}&change=flip%3D2`,
  `${LUONG}&predict=1`,
  "mechanism=multi_head&sentence=I+am+tired.&word=3&change=scale%3D1",
  "mechanism=example:multi-head&lang=ko",
];

for (const hash of PAGES) {
  test(`nothing scrolls sideways at 390: ${hash}`, { skip }, async () => {
    const { page, quiet } = await open(hash, { width: 390 });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390);
    for (let larger = 0; larger < 3; larger += 1) await page.getByRole("button", { name: "A+" }).click();
    if (hash.includes("lang=ko")) assert.deepEqual(await brokenWords(page), []);
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390);
    quiet();
  });
}

for (const hash of PAGES) {
  for (const scheme of ["light", "dark"] as const) {
    test(`no fault of contrast, names or roles, ${scheme}: ${hash}`, { skip: skip || withoutAxe }, async () => {
      const { page, quiet } = await open(hash, { scheme });
      assert.deepEqual(await axeFaults(page), []);
      quiet();
    });
  }
}

test("all can be reached by Tab, and what has the focus is seen", { skip }, async () => {
  const { page, quiet } = await open(LUONG);
  const reached = new Set<string>();
  for (let press = 0; press < 60; press += 1) {
    await page.keyboard.press("Tab");
    reached.add(await page.evaluate(() => document.activeElement?.outerHTML.slice(0, 120) ?? ""));
    if (press === 5)
      assert.notEqual(await page.evaluate(() => getComputedStyle(document.activeElement as Element).outlineStyle), "none");
  }
  const all = await page
    .locator(":is(button, select, input):not([disabled])")
    .evaluateAll((controls) => controls.map((one) => one.outerHTML.slice(0, 120)));
  assert.deepEqual(
    all.filter((one) => !reached.has(one)),
    [],
  );
  quiet();
});
