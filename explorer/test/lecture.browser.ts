/** The lecture of docs/guides/ten-clicks.md, followed in Chromium; tests/explorer/test_ten_clicks.py serves its models. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import type { Browser, Locator, Page } from "playwright-core";
import { axeFaults, launch } from "./chromium.ts";
import { type Lesson, lessons, parts } from "./lessons.ts";

/** The served pages of the lessons, in their order. */
const addresses = (process.env.LECTURE ?? "").split(",").filter(Boolean);
const skip = addresses.length ? false : "LECTURE names no served pages: tests/explorer/test_ten_clicks.py does";
const all = skip ? [] : lessons(readFileSync(process.env.LECTURE_PAGE ?? "", "utf8"));

let browser: Browser;
before(async () => {
  if (!skip) browser = await launch();
});
after(() => browser?.close());

/** What has this name, to be pressed: a control, a token, or a head. */
async function named(page: Page, name: string): Promise<Locator> {
  const start = new RegExp(`^${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\s+/g, "\\s+")}(\\s|\\d|$)`);
  const candidates = [
    page.getByRole("button", { name, exact: true }),
    page.locator("button.thumb", { has: page.locator(".number", { hasText: new RegExp(`^${name}$`) }) }),
    page.locator("button, .token").filter({ hasText: start }),
  ];
  for (const one of candidates) {
    const seen = one.locator("visible=true");
    if (await seen.count()) return seen.first();
  }
  return candidates[0];
}

/** Words that are in sight; numbers with a point to within 0.5 %, since another machine rounds otherwise. */
async function sees(page: Page, words: string): Promise<void> {
  await page.waitForFunction(
    (words) => {
      const number = /\d+\.\d+/g;
      const wanted = (words.match(number) ?? []).map(Number);
      const pattern = words
        .split(number)
        .map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"))
        .join("(\\d+\\.\\d+)");
      const seen = [...document.querySelectorAll<HTMLElement>(".regard-explorer, tr")].map((one) => one.innerText.replace(/\s+/g, " "));
      return seen.some((text) =>
        [...text.matchAll(new RegExp(pattern, "g"))].some((found) =>
          wanted.every((value, at) => Math.abs(Number(found[at + 1]) - value) <= 0.005 * value + 5e-5),
        ),
      );
    },
    words,
    { timeout: 60_000 },
  );
}

async function follow(page: Page, { steps }: Lesson): Promise<void> {
  for (const { number, text, choose, press, seen } of steps) {
    try {
      if (choose) {
        const box = page.getByRole("combobox", { name: choose[0], exact: true });
        await box.selectOption({ label: choose[1] });
      }
      for (const name of press) await (await named(page, name)).click();
      for (const words of seen) await sees(page, words);
    } catch (error) {
      const shown = (await page.locator(".regard-explorer").innerText()).slice(0, 3000);
      throw new Error(`step ${number}, ${text}: ${error}\n${shown}`);
    }
  }
}

test("the lecture has lessons of ten steps, each of which does something and shows something", { skip }, () => {
  assert.equal(all.length, addresses.length);
  for (const { steps } of all) {
    assert.deepEqual(steps.map(({ number }) => number), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    for (const step of steps) assert.ok(step.seen.length && (step.choose || step.press.length === 1), step.text);
  }
});

test("in Korean the steps are the same", { skip }, () => {
  const path = process.env.LECTURE_PAGE ?? "";
  const korean = readFileSync(path.replace(/\.md$/, ".ko.md"), "utf8");
  assert.deepEqual(parts(korean), parts(readFileSync(path, "utf8")));
});

for (const [at, address] of addresses.entries()) {
  test(`lesson ${at + 1}: ${all[at]?.title}`, { skip }, async () => {
    for (const size of [{ width: 1366, height: 768 }, { width: 390, height: 844 }]) {
      const page = await browser.newPage({ viewport: size });
      const errors: string[] = [];
      page.on("pageerror", (error) => errors.push(String(error)));
      page.on("console", (message) => errors.push(message.text()));
      await page.goto(address);
      await page.waitForSelector(".regard-explorer main > div");
      await follow(page, all[at]);
      assert.deepEqual(errors, []);
      assert.deepEqual(await axeFaults(page), []);
      await page.close();
    }
  });
}
