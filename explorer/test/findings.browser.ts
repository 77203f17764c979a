/** Pages of findings in Chromium, from files; tests/doctor/test_page_in_chromium.py writes them to FINDINGS. */

import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import type { Browser, Page } from "playwright-core";
import { axeFaults, launch, withoutAxe } from "./chromium.ts";

const folder = process.env.FINDINGS ?? "";
const skip = folder ? false : "FINDINGS names no folder of pages: tests/doctor/test_page_in_chromium.py does";

let browser: Browser;
before(async () => {
  if (folder)
    browser = await launch();
});
after(() => browser?.close());

interface Opened {
  page: Page;
  /** Fails if the page said anything on its console, threw, or asked for anything but itself. */
  quiet(): void;
}

async function open(name: string, look: { width?: number; scheme?: "light" | "dark"; hash?: string } = {}) {
  const page = await browser.newPage({
    viewport: { width: look.width ?? 1280, height: 900 },
    colorScheme: look.scheme ?? "light",
  });
  const faults: string[] = [];
  const address = pathToFileURL(join(folder, name)).href;
  page.on("console", (message) => faults.push(message.text()));
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(address) && !/^(data|blob|about):/.test(url)) faults.push(url);
  });
  await page.goto(address + (look.hash ?? ""));
  await page.locator("[role=status]:not(:empty)").waitFor();
  return { page, quiet: () => assert.deepEqual(faults, []) } satisfies Opened;
}

const shown = (page: Page) => page.locator("article.finding:visible").count();

test("check boxes and search leave findings out, and say how many", { skip }, async () => {
  const { page, quiet } = await open("code.html");
  assert.equal(await shown(page), 4);
  await page.getByLabel("hints").uncheck();
  assert.equal(await shown(page), 3);
  assert.equal(await page.getByRole("status").textContent(), "3 of 4 findings");
  await page.getByRole("searchbox").fill("ATT111 wrong");
  assert.equal(await shown(page), 1);
  assert.equal(await page.locator("nav a:visible").count(), 1);
  await page.keyboard.press("Escape");
  assert.equal(await shown(page), 3);
  await page.getByRole("searchbox").fill("no such words");
  assert.equal(await shown(page), 0);
  assert.equal(await page.locator("nav li:visible").count(), 0);
  quiet();
});

test("keys lead from finding to finding, and to the search", { skip }, async () => {
  const { page, quiet } = await open("code.html");
  const current = () => page.evaluate(() => document.activeElement?.id);
  const names = await page.locator("article.finding").evaluateAll((all) => all.map((one) => one.id));
  await page.keyboard.press("j");
  assert.equal(await current(), names[0]);
  await page.keyboard.press("j");
  assert.equal(await current(), names[1]);
  await page.keyboard.press("k");
  assert.equal(await current(), names[0]);
  await page.keyboard.press("/");
  await page.keyboard.type("jk");
  assert.equal(await page.getByRole("searchbox").inputValue(), "jk");
  quiet();
});

test("an explanation stands beside the finding when it is opened", { skip }, async () => {
  const { page, quiet } = await open("code.html", { hash: "#file-0-ATT111-line-2-column-12" });
  const finding = page.locator("article:target");
  await finding.getByText("Why, and what is right").click();
  await finding.getByText("Wrong", { exact: true }).waitFor();
  assert.ok(await finding.locator("a[href^='https://']").count());
  quiet();
});

test("code is text: nothing of it runs or ends an element", { skip }, async () => {
  const { page, quiet } = await open("hostile.html");
  assert.equal(await page.evaluate(() => (window as unknown as { harmed?: number }).harmed), undefined);
  assert.equal(await page.locator("pre :is(script, img, b)").count(), 0);
  const code = (await page.locator("pre.code").first().textContent()) ?? "";
  for (const sign of ["</script><script>window.harmed=1</script>", "⟨U+202E⟩", "⟨U+200B⟩", "␛", '"quoted\'']) {
    assert.ok(code.includes(sign), `${sign} in ${code}`);
  }
  quiet();
});

test("a map opens in the explorer at its pair", { skip }, async () => {
  const { page, quiet } = await open("model.html");
  assert.ok((await page.locator("figure svg image").count()) >= 2);
  await page.locator(".open-map").first().click();
  const explorer = page.frameLocator("iframe");
  await explorer.locator(".plot").first().waitFor();
  await explorer.getByText(/How far each token moves each output · head 0/).first().waitFor();
  assert.match((await explorer.locator(".status").textContent()) ?? "", /^query \d+/);
  quiet();
});

for (const [name, width] of [
  ["code.html", 390],
  ["hostile.html", 390],
  ["model.html", 390],
  ["model.html", 1280],
] as const) {
  test(`${name} does not scroll sideways at ${width}`, { skip }, async () => {
    const { page, quiet } = await open(name, { width });
    await page.evaluate(() => {
      for (const details of document.querySelectorAll("details")) details.open = true;
    });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
    quiet();
  });
}

for (const name of ["code.html", "model.html"]) {
  for (const scheme of ["light", "dark"] as const) {
    test(`${name} has no fault of contrast, names or roles, ${scheme}`, { skip: skip || withoutAxe }, async () => {
      const { page, quiet } = await open(name, { scheme });
      await page.evaluate(() => {
        for (const details of document.querySelectorAll("details")) details.open = true;
        for (const finding of document.querySelectorAll<HTMLElement>(".finding"))
          finding.style.contentVisibility = "visible";
      });
      assert.deepEqual(await axeFaults(page), []);
      quiet();
    });
  }
}

test("thousands of findings are filtered at once", { skip }, async () => {
  const { page, quiet } = await open("many.html");
  const all = await page.locator("article.finding").count();
  assert.ok(all >= 3000);
  const taken = await page.evaluate(async () => {
    const search = document.querySelector("input[type=search]") as HTMLInputElement;
    const start = performance.now();
    search.value = "module_7.py";
    search.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    return performance.now() - start;
  });
  assert.ok((await shown(page)) < all / 10);
  assert.ok(taken < 2000, `${taken} ms`);
  quiet();
});
