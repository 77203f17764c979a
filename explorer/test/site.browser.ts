/** The built site in Chromium, opened from a disk; tests/test_site.py writes its folder to SITE. */

import assert from "node:assert/strict";
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";
import { gzipSync } from "node:zlib";
import type { Browser, Page } from "playwright-core";
import { axeFaults, launch, withoutAxe } from "./chromium.ts";

const folder = process.env.SITE ?? "";
const skip = folder ? false : "SITE names no built site: tests/test_site.py does";
const pages = folder
  ? readdirSync(folder, { recursive: true, encoding: "utf-8" })
      .filter((name) => name.endsWith(".html"))
      .filter((name) => name !== "404.html") // for servers, which send it from the root
  : [];
// One of each kind: each template, and the longest tables and formulas.
const kinds = (process.env.SITE_PAGES ?? "").split(",").filter(Boolean);

const FIRST_PAGE = { milliseconds: 1000, bytes: 300_000 };

let browser: Browser;
before(async () => {
  if (folder)
    browser = await launch();
});
after(() => browser?.close());

async function open(name: string, look: { width?: number; scheme?: "light" | "dark" } = {}): Promise<Page> {
  const page = await browser.newPage({
    viewport: { width: look.width ?? 1280, height: 900 },
    colorScheme: look.scheme ?? "light",
  });
  await page.goto(pathToFileURL(join(folder, name)).href);
  return page;
}

interface Contents {
  names: string[];
  links: string[];
  /** The width of the page, and of the window. */
  width: [number, number];
}

/** What each page has, read once for all tests, on a telephone. */
let read: Promise<Map<string, Contents>> | undefined;
const contents = () =>
  (read ??= (async () => {
    const page = await browser.newPage({ viewport: { width: 390, height: 844 } });
    const found = new Map<string, Contents>();
    for (const name of pages) {
      await page.goto(pathToFileURL(join(folder, name)).href);
      const own = await page.evaluate(() => ({
        names: [...document.querySelectorAll("[id]")].map((one) => one.id),
        links: [
          ...[...document.querySelectorAll<HTMLAnchorElement>("a[href]")].map((one) => one.href),
          ...[...document.querySelectorAll<HTMLImageElement>("img[src]")].map((one) => one.src),
        ],
        width: [document.documentElement.scrollWidth, innerWidth] as [number, number],
      }));
      found.set(join(folder, name), own);
    }
    await page.close();
    return found;
  })());

test("all links lead to a file of the site, and to a heading that is there", { skip }, async () => {
  const found = await contents();
  const broken = new Set<string>();
  let count = 0;
  for (const [from, { links }] of found)
    for (const link of links.filter((one) => one.startsWith("file:"))) {
      const url = new URL(link);
      const to = fileURLToPath(url.href.split("#")[0]);
      const hash = decodeURIComponent(url.hash.slice(1));
      const there = existsSync(to) && !statSync(to).isDirectory();
      const isHeading = hash && !relative(resolve(folder), to).startsWith("figures"); // of a figure it is its state
      if (!there || (isHeading && found.get(to)?.names.includes(hash) === false))
        broken.add(`${relative(folder, from)}: ${relative(resolve(folder), to)}#${hash}`);
      count++;
    }
  assert.deepEqual([...broken], []);
  assert.ok(count > 1000, `${count} links were read`);
});

test("no page scrolls sideways on a telephone", { skip }, async () => {
  const wide = [...(await contents())].filter(([, { width }]) => width[0] > width[1]);
  assert.deepEqual(
    wide.map(([name, { width }]) => `${relative(folder, name)}: ${width[0]}`),
    [],
  );
});

for (const scheme of ["light", "dark"] as const)
  test(`axe finds no fault, ${scheme}`, { skip: skip || withoutAxe }, async () => {
    const faults: string[] = [];
    for (const name of kinds) {
      const page = await open(name, { scheme });
      const found = await axeFaults(page, ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]);
      faults.push(...found.map((fault) => `${name}: ${fault}`));
      await page.close();
    }
    assert.deepEqual(faults, []);
  });

test("the first page comes within a second, and in at most 300 kB, all of it from the site", { skip }, async () => {
  const page = await browser.newPage();
  const loaded: string[] = [];
  page.on("request", (request) => loaded.push(request.url()));
  await page.goto(pathToFileURL(join(folder, "index.html")).href, { waitUntil: "load" });
  const before = loaded.length; // the index of the search comes after the page
  await page.waitForLoadState("networkidle");
  assert.deepEqual(
    loaded.filter((url) => !/^(file|data|blob):/.test(url)),
    [],
  );
  const needed = loaded.slice(0, before).filter((url) => url.startsWith("file:") && !url.includes("/search/"));
  const files = [...new Set(needed.map((url) => fileURLToPath(url.split(/[?#]/)[0])))].filter(existsSync);
  const sizes = files.map((file) => ({ file, size: gzipSync(readFileSync(file)).length })); // as servers send them
  const bytes = sizes.reduce((sum, { size }) => sum + size, 0);
  const table = sizes.map(({ file, size }) => `${size} ${relative(folder, file)}`).join("\n");
  assert.ok(bytes <= FIRST_PAGE.bytes, `${bytes} bytes:\n${table}`);
  const times: number[] = [];
  for (let load = 0; load < 5; load++) {
    const fresh = await open("index.html"); // nothing is cached
    times.push(
      await fresh.evaluate(() => {
        const [one] = performance.getEntriesByType("navigation") as PerformanceNavigationTiming[];
        return one.loadEventEnd - one.startTime;
      }),
    );
    await fresh.close();
  }
  const milliseconds = Math.min(...times); // the page's own time: other work only adds to it
  assert.ok(milliseconds <= FIRST_PAGE.milliseconds, `${milliseconds} ms`);
  console.log(`first page: ${Math.round(milliseconds)} ms, ${Math.round(bytes / 1000)} kB`);
  await page.close();
});

test("the search answers from a disk, by keyboard alone", { skip }, async () => {
  const page = await open("index.html");
  await page.keyboard.press("/");
  await page.keyboard.type("softmax");
  const first = page.locator(".md-search-result__link").first();
  await first.waitFor({ timeout: 20_000 });
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => !location.pathname.endsWith("/index.html") || location.hash || location.search);
  await page.close();
});

for (const [width, name] of [
  [1366, "mechanisms/scaled-dot-product.html"],
  [390, "ko/mechanisms/scaled-dot-product.html"],
] as const)
  test(`a figure in a page moves, is worked by keys and follows the page's theme, ${width}`, { skip }, async () => {
    const page = await open(name, { width });
    const frame = page.locator("figure.live iframe");
    await frame.scrollIntoViewIfNeeded();
    const inside = frame.contentFrame();
    const root = inside.locator("#regard-steps");
    await inside.locator("#step-weights table").waitFor();
    assert.equal(await root.getAttribute("data-theme"), "light");
    assert.equal(await inside.locator("html").getAttribute("lang"), name.startsWith("ko") ? "ko" : "en");
    assert.equal(await root.evaluate((one) => one.ownerDocument.documentElement.scrollWidth <= innerWidth), true);
    const high = await frame.evaluate((one) => one.getBoundingClientRect().height / innerHeight);
    assert.ok(high > 0.5 && high <= 0.9, `${high} of the window`);
    await page.locator('label[for^="__palette"]:visible').click();
    await inside.locator('#regard-steps[data-theme="dark"]').waitFor();
    await page.locator("figure.live").evaluate((one) => {
      one.tabIndex = -1;
      one.focus();
    });
    let focused = "";
    for (let press = 0; press < 12 && !focused; press += 1) {
      await page.keyboard.press("Tab");
      focused = await root.evaluate(
        (one) => (one.ownerDocument.activeElement as HTMLInputElement).type === "checkbox" && "scale",
      ) || "";
    }
    await page.keyboard.press("Space");
    await inside.locator("#step-weights mark").first().waitFor();
    assert.equal(await inside.locator("#step-scaled_scores").count(), 0);
    assert.equal(await inside.locator("#step-scores mark").count(), 0);
    await inside.getByRole("checkbox", { name: /k2/ }).uncheck(); // both changes stay
    await inside.locator("#step-mask mark").waitFor();
    assert.equal(await inside.locator("#step-scaled_scores").count(), 0);
    assert.equal(await inside.locator("#step-weights mark").count(), 9);
    await page.close();
  });

const lessons = pages.filter((name) => /^(ko\/)?course\/\d\d-.*(?<!-slides)\.html$/.test(name));

for (const language of ["en", "ko"] as const)
  test(`the figure of every lesson moves, and its slides have one idea each, ${language}`, { skip }, async () => {
    const own = lessons.filter((name) => name.startsWith("ko/") === (language === "ko"));
    assert.equal(own.length, 10);
    for (const name of own) {
      const page = await open(name, language === "ko" ? { width: 390, scheme: "dark" } : { width: 1366 });
      const faults: string[] = [];
      page.on("pageerror", (error) => faults.push(`${name}: ${error}`));
      const frame = page.locator("figure.live iframe");
      await frame.scrollIntoViewIfNeeded();
      const inside = frame.contentFrame();
      await inside.locator(".tables table").first().waitFor();
      assert.equal(await inside.locator("html").getAttribute("lang"), language, name);
      assert.equal(await inside.locator("mark").count(), 0, name);
      await inside.locator('input[type="checkbox"]:checked:enabled').first().uncheck();
      await inside.locator("mark").first().waitFor();
      await page.getByRole("link", { name: language === "ko" ? "이 강의의 슬라이드" : "Slides of this lesson" }).click();
      await page.waitForURL(/-slides\.html$/);
      const slides = await page.locator("section").evaluateAll((all) =>
        all.map((one) => one.querySelectorAll("h1, h2, h3").length),
      );
      assert.ok(slides.length >= 10, `${name}: ${slides.length} slides`);
      assert.deepEqual([...new Set(slides)], [1], name);
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), true, name);
      const cut = await page.locator("section, pre").evaluateAll((all) =>
        all
          .filter((one) => one.scrollWidth > one.clientWidth || (one.tagName === "SECTION" && one.clientHeight > innerHeight))
          .map((one) => one.textContent?.slice(0, 30)),
      );
      assert.deepEqual(cut, [], name); // each slide fits the window, and no command leaves it
      assert.deepEqual(faults, []);
      await page.close();
    }
  });

test("a page in Korean leads to the same page in English, and back", { skip }, async () => {
  const page = await open("ko/mechanisms/scaled-dot-product.html");
  assert.equal(await page.evaluate(() => document.documentElement.lang), "ko");
  const english = await page.locator('a[hreflang="en"]').first().getAttribute("href");
  const there = resolve(dirname(join(folder, "ko/mechanisms")), english ?? "");
  assert.ok(readFileSync(join(folder, "mechanisms/scaled-dot-product.html"), "utf-8").includes('hreflang="ko"'), there);
  await page.close();
});
