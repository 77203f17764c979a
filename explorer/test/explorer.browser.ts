import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { figure } from "../src/text.ts";
import { type Bench, hashOf, open, plotBox, plotPixels, type Root, settled, shapesOf, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

test("the grid shows all heads; a click opens one", async () => {
  const { page, quiet } = await open(bench, "small/");
  await settled(page);
  assert.equal(await page.locator("button.thumb").count(), 8);
  assert.equal(await page.locator("canvas.drawn").count(), 8);
  const label = await page.locator("button.thumb").nth(5).locator(".told").textContent();
  assert.match(label ?? "", /^h\.1 · head 1/);
  await page.locator("button.thumb").nth(5).click();
  await settled(page);
  assert.equal(await hashOf(page), "#view=head&map=1&head=1");
  assert.equal(await page.locator("aside h2").textContent(), "h.1 · head 1");
  quiet();
});

test("heads are filtered by role and metric and sorted", async () => {
  const { page, quiet } = await open(bench, "small/#order=-entropy");
  await settled(page);
  const values = (await page.locator(".thumb .value").allTextContents()).map((text) => Number(text.split(" ")[0]));
  assert.deepEqual(
    values,
    [...values].sort((a, b) => b - a),
  );
  await page.getByLabel("Metric").fill(`entropy > ${values[2] - 1e-4}`);
  assert.equal(await page.locator("button.thumb").count(), 3);
  await page.getByLabel("Metric").fill("entropy >");
  assert.equal(await page.getByLabel("Metric").getAttribute("aria-invalid"), "true");
  await page.getByLabel("Metric").fill("");
  const role = (await page.getByLabel("Role").locator("option").nth(1).getAttribute("value")) ?? "";
  await page.getByLabel("Role").selectOption(role);
  const shown = await page.locator("button.thumb").count();
  assert.ok(shown > 0 && shown < 8);
  assert.match(
    (await page.locator("button.thumb").first().locator(".told").textContent()) ?? "",
    new RegExp(`${role}: score .* n = 95\\. Rule: mean weight`),
  );
  quiet();
});

test("from 100,000 tokens down to one weight", async () => {
  const { page, quiet } = await open(bench, "long/#view=head");
  await settled(page);
  assert.match((await page.locator(".level").textContent()) ?? "", /^max of \d+ × \d+ cells$/);
  const box = await plotBox(page);
  const [x, y] = [box.x + box.width * 0.4, box.y + box.height * 0.6];
  await page.mouse.move(x, y);
  await page.waitForFunction(() => /^\d\.\d+/.test(document.querySelector(".tip strong")?.textContent ?? ""));
  assert.match((await page.locator(".tip").textContent()) ?? "", /exact weight; shown: max of/);
  for (let turn = 0; turn < 26; turn += 1) await page.mouse.wheel(0, -400);
  await settled(page);
  assert.equal(await page.locator(".level").textContent(), "exact weights");
  await page.mouse.click(x, y);
  await settled(page);
  const at = /at=(\d+),(\d+)/.exec(
    await page.evaluate(() => new Promise<string>((resolve) => setTimeout(() => resolve(location.hash), 400))),
  );
  assert.ok(at);
  const [row, column] = [Number(at[1]), Number(at[2])];
  assert.ok(Math.abs(row - 60_000) < 300 && Math.abs(column - 40_000) < 300, `${row}, ${column}`);
  const weight = Math.fround(bench.served.atlas("long").maps[0].weight(0, row, column));
  assert.equal(await page.locator(".tip strong").textContent(), figure(weight));
  assert.match(
    (await page.locator(".status").textContent()) ?? "",
    new RegExp(`${figure(weight).replace(".", "\\.")}$`),
  );
  quiet();
});

test("tiles out of sight are dropped, and no more is held than allowed", async () => {
  const slow = await start(80);
  const { page, quiet } = await open(slow, "long/#view=head&frame=50000,50000,1200");
  const box = await plotBox(page);
  await page.mouse.move(box.x + 200, box.y + 200);
  for (let step = 0; step < 12; step += 1) {
    await page.mouse.down();
    await page.mouse.move(box.x + 200 - 190, box.y + 200 - 190, { steps: 4 });
    await page.mouse.up();
    await page.mouse.move(box.x + 200, box.y + 200);
  }
  await settled(page);
  const { dropped, held } = await page.evaluate(() => {
    const { loading } = (document.getElementById("regard-explorer") as unknown as Root).explorer;
    return { dropped: loading.counts.dropped, held: loading.held };
  });
  assert.ok(dropped > 0, "nothing was dropped");
  assert.ok(held <= 64e6, `${held} bytes are held`);
  assert.ok(await page.locator(".level").textContent(), "exact weights");
  quiet();
  await slow.close();
});

test("the keyboard alone", async () => {
  const { page, quiet } = await open(bench, "small/");
  await settled(page);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".head-view");
  assert.equal(await hashOf(page), "#view=head&head=1");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowDown");
  assert.equal(await hashOf(page), "#view=head&map=1&head=2");
  await page.keyboard.press("+");
  await page.waitForFunction(() => location.hash.includes("frame="));
  await page.keyboard.press("0");
  await page.waitForFunction(() => !location.hash.includes("frame="));
  await page.keyboard.press("g");
  await page.keyboard.type("20, 4");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => location.hash.includes("at=20,4"));
  await settled(page);
  const weight = Math.fround(bench.served.atlas("small").maps[1].weight(2, 20, 4));
  assert.match(
    (await page.locator(".status").textContent()) ?? "",
    new RegExp(`query 20 .* key 4 .* ${figure(weight)}$`),
  );
  for (const [key, view] of [
    ["l", "lines"],
    ["c", "compare"],
    ["t", "table"],
    ["Escape", ""],
    ["h", "head"],
  ]) {
    await page.keyboard.press(key);
    assert.equal(/view=(\w+)/.exec(await hashOf(page))?.[1] ?? "", view);
  }
  await page.keyboard.press("?");
  assert.ok(await page.locator("dialog[open]").isVisible());
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => !document.querySelector("dialog"));
  assert.match(await hashOf(page), /view=head/);
  quiet();
});

test("search finds tokens", async () => {
  const { page, quiet } = await open(bench, "cross/#view=head");
  await page.keyboard.press("/");
  await page.keyboard.type("HAUS");
  await page.locator(".results button").first().click();
  await page.waitForFunction(() => /[#&]at=4,(&|$)/.test(location.hash));
  quiet();
});

test("permalinks come back, and so do the steps before", async () => {
  const { page, quiet } = await open(
    bench,
    "small/#view=head&map=1&head=2&scale=log&colours=magma&theme=dark&frame=20,20,30&at=21,20",
  );
  await settled(page);
  assert.equal(await page.getByLabel("Scale").inputValue(), "log");
  assert.equal(await page.locator(".regard-explorer").getAttribute("data-theme"), "dark");
  const first = await plotPixels(page);
  await page.keyboard.press("t");
  await page.keyboard.press("Escape");
  assert.match(await hashOf(page), /^#map=1/);
  await page.goBack();
  await page.waitForSelector(".table-view");
  await page.goBack();
  await page.waitForSelector(".head-view");
  await settled(page);
  assert.deepEqual((await plotPixels(page)).data, first.data);
  await page.goForward();
  await page.waitForSelector(".table-view");
  quiet();
});

test("lines follow threshold, count and direction, and tokens isolate", async () => {
  const { page, quiet } = await open(bench, "cross/#view=lines&top=1&threshold=0");
  await settled(page);
  const told = () => page.locator(".level").textContent();
  assert.match((await told()) ?? "", /^17 lines · queries 0–16, keys 0–16 · 100 % of the weight/);
  await page.getByLabel("Greatest").fill("2");
  await settled(page);
  assert.match((await told()) ?? "", /^34 lines/);
  await page.getByLabel("Threshold").fill("0.5");
  await settled(page);
  assert.match((await told()) ?? "", /^\d lines/);
  await page.locator("[aria-label^='lines between']").hover({ position: { x: 360, y: 34 + 21 * 3.5 } });
  await settled(page);
  const shapes = await page.evaluate(() =>
    JSON.stringify((document.getElementById("regard-explorer") as unknown as Root).explorer.view.picture().shapes),
  );
  assert.match(shapes, /"bold":true[^}]*/);
  quiet();
});

test("compared heads move together; the difference is one minus the other", async () => {
  const { page, quiet } = await open(bench, "small/#view=head&map=0&head=1");
  await page.keyboard.press("p");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("p");
  await page.keyboard.press("c");
  await page.keyboard.press("d");
  await settled(page);
  assert.equal(await page.locator(".pane").count(), 3);
  const box = await plotBox(page);
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
  for (let turn = 0; turn < 6; turn += 1) await page.mouse.wheel(0, -400);
  await settled(page);
  const last = await page.locator(".plot").nth(2).boundingBox();
  assert.ok(last);
  await page.mouse.move(last.x + last.width / 2 - 30, last.y + last.height / 2 + 2);
  await page.waitForFunction(() =>
    /\d/.test(document.querySelector(".pane:nth-child(3) .tip strong")?.textContent ?? ""),
  );
  const words = (await page.locator(".tip").nth(2).textContent()) ?? "";
  const [row, column] = [Number(/query (\d+)/.exec(words)?.[1]), Number(/key (\d+)/.exec(words)?.[1])];
  const { weight } = bench.served.atlas("small").maps[0];
  const wanted = Math.fround(weight(1, row, column)) - Math.fround(weight(2, row, column));
  assert.equal(await page.locator(".pane:nth-child(3) .tip strong").textContent(), figure(wanted));
  quiet();
});

/** Everything that is written into the picture of the view. */
async function written(page: import("playwright-core").Page): Promise<string[]> {
  await settled(page);
  const shapes = await page.evaluate(() =>
    JSON.stringify((document.getElementById("regard-explorer") as unknown as Root).explorer.view.picture().shapes),
  );
  return [...shapes.matchAll(/"text":"([^"]*)"/g)].map(([, text]) => text);
}

test("rows divided by their greatest weight, and by what where that is not known", async () => {
  const near = await open(bench, "short/#view=head&head=3&normalise=1&frame=400,380,40&scale=linear");
  const told = await written(near.page);
  assert.ok(told.includes("1.0000 × row maximum  ·  linear"), told.join("\n"));
  assert.ok(told.includes("largest") && told.includes("entropy"));
  // Each row of the tile at the right is divided by a weight that lies in the tile at the left.
  const { weight } = bench.served.atlas("short").maps[0];
  const greatest = Math.max(...Array.from({ length: 401 }, (_, column) => weight(3, 400, column)));
  await near.page.evaluate(() => new Promise((resolve) => setTimeout(resolve, 50)));
  const seen = await near.page.evaluate(() => {
    const root = document.getElementById("regard-explorer") as unknown as Root;
    const { field, context } = root.explorer.view.panel as unknown as {
      field: { exact(...given: unknown[]): { data: Float32Array } };
      context: { loader: { peek(key: string): unknown } };
    };
    const need = (key: string) => context.loader.peek(key);
    const settings = { reduce: "max", normalise: true, clip: false };
    return field.exact(need, { row: 1, column: 1 }, 1, settings).data[(400 - 256) * 256 + 300 - 256];
  });
  assert.ok(Math.abs(seen - weight(3, 400, 300) / greatest) < 1e-5, `${seen}`);
  near.quiet();
  const far = await open(bench, "long/#view=head&normalise=1&scale=linear");
  const whole = await written(far.page);
  assert.ok(
    whole.some((text) => /^1\.0000 × maximum of \d+ rows {2}· {2}linear$/.test(text)),
    whole.join("\n"),
  );
  assert.ok(whole.includes("no pair"));
  far.quiet();
  const mean = await open(bench, "long/#view=head&normalise=1&reduce=mean&scale=linear");
  const means = await written(mean.page);
  assert.ok(means.includes("1.0000 × greatest mean of the row  ·  linear"), means.join("\n"));
  assert.ok(means.includes("no pair, 0 in a mean"));
  mean.quiet();
});

test("cells of a level that have no pair are hatched", async () => {
  const { page, quiet } = await open(bench, "long/#view=head&reduce=mean");
  await settled(page);
  assert.match((await page.locator(".level").textContent()) ?? "", /^mean of \d+ × \d+ cells$/);
  const { width, height, data } = await plotPixels(page);
  const colour = (x: number, y: number) => data.subarray(4 * (y * width + x), 4 * (y * width + x) + 3).toString("hex");
  const [above, below] = [new Set<string>(), new Set<string>()];
  for (let step = 0; step < 16; step += 1) {
    above.add(colour(Math.floor(width * 0.9) + step, Math.floor(height * 0.1)));
    below.add(colour(Math.floor(width * 0.1) + step, Math.floor(height * 0.9)));
  }
  assert.deepEqual([...above].sort(), ["c9ced4", "eef0f2"]);
  assert.ok(!below.has("c9ced4") && !below.has("eef0f2"));
  quiet();
});

test("the table sorts, and says so", async () => {
  const { page, quiet } = await open(bench, "small/#view=table");
  await page.getByRole("button", { name: "sink", exact: true }).click();
  assert.equal(await page.locator("th[aria-sort=descending]").textContent(), "sink ↓");
  const column = () => page.locator("tbody tr td:nth-child(6)").allTextContents();
  const falling = (await column()).map(Number);
  assert.deepEqual(
    falling,
    [...falling].sort((a, b) => b - a),
  );
  await page.getByRole("button", { name: "sink ↓" }).click();
  const rising = (await column()).map(Number);
  assert.deepEqual(rising, [...falling].reverse());
  await page.locator("tbody .link").first().click();
  await page.waitForSelector(".head-view");
  quiet();
});

test("every control has a name", async () => {
  for (const view of ["grid", "head", "lines", "text", "compare", "table"]) {
    const { page, quiet } = await open(bench, `small/#view=${view}&pins=0.0,0.1`);
    await settled(page);
    const nameless = await page.evaluate(() =>
      [...document.querySelectorAll("button, select, input, [role=img]")]
        .filter((node) => {
          const text = node.tagName === "BUTTON" ? node.textContent : "";
          const label = (node as HTMLInputElement).labels?.[0]?.textContent;
          return !(node.getAttribute("aria-label") || label || text?.trim());
        })
        .map((node) => node.outerHTML.slice(0, 120)),
    );
    assert.deepEqual(nameless, []);
    assert.equal(await page.locator("[tabindex]:not([tabindex='0']):not([tabindex='-1'])").count(), 0);
    quiet();
    await page.close();
  }
});

test("light, dark and what the system prefers", async () => {
  const paper = (page: import("playwright-core").Page) =>
    page.locator(".regard-explorer").evaluate((node) => getComputedStyle(node).backgroundColor);
  const { page, quiet } = await open(bench, "small/", { scheme: "dark" });
  assert.equal(await paper(page), "rgb(20, 23, 27)");
  await page.emulateMedia({ colorScheme: "light" });
  await page.waitForFunction(() => document.querySelector<HTMLElement>(".regard-explorer")?.dataset.theme === "light");
  assert.equal(await paper(page), "rgb(255, 255, 255)");
  await page.getByTitle("Theme").selectOption("dark");
  assert.equal(await paper(page), "rgb(20, 23, 27)");
  quiet();
});

async function saved(page: Page, kind: string): Promise<string> {
  const [download] = await Promise.all([page.waitForEvent("download"), page.click(`[data-save=${kind}]`)]);
  return readFileSync(await download.path(), "latin1");
}

test("pictures of the heads hold those that were not scrolled to, a title, names, roles and a legend", async () => {
  const { page, quiet } = await open(bench, "short/");
  const svg = await saved(page, "svg");
  const images = svg.match(/<image [^>]*width="72"[^>]*>/g) ?? [];
  assert.equal(images.length, 144);
  const blank = images.filter((image) => image.length < 400);
  assert.equal(blank.length, 0);
  for (const text of ["synthetic, 12 × 12 heads, 512 tokens: heads by layer", "h.0", "h.11", "prev", "no pair"])
    assert.ok(Buffer.from(svg, "latin1").toString().includes(`>${text}<`), text);
  assert.match(await saved(page, "png"), /^.PNG/);
  quiet();
});

test("queries that attend to NaN are drawn and told apart from pairs that do not exist", async () => {
  const { page, quiet } = await open(bench, "broken/#view=head&head=1&at=15,3");
  await settled(page);
  const warning = (await page.getByRole("alert").textContent()) ?? "";
  assert.match(warning, /^NaN: in 1 of 2 heads there are queries that attend to NaN .* head 1 \(8 of 20\)\.$/);
  assert.equal(await page.locator(".chosen p").textContent(), "NaN: this query attends to NaN or infinity");
  const box = await plotBox(page);
  const cell = (row: number, column: number) =>
    [box.x + ((column + 0.5) * box.width) / 20, box.y + ((row + 0.5) * box.height) / 20] as const;
  for (const [row, column, words] of [
    [15, 4, "NaN: this query attends to NaN or infinity"],
    [15, 18, "no pair: the mask forbids it"],
  ] as const) {
    await page.mouse.move(...cell(row, column));
    await page.waitForFunction((text) => document.querySelector(".tip strong")?.textContent === text, words);
  }
  const { width, data } = await plotPixels(page);
  const colours = (row: number, column: number) => {
    const side = width / 20;
    const found = new Set<string>();
    for (let y = 2; y < side - 2; y += 1)
      for (let x = 2; x < side - 2; x += 1) {
        const at = 4 * (Math.floor(row * side + y) * width + Math.floor(column * side + x));
        found.add(data.subarray(at, at + 3).join());
      }
    return found;
  };
  assert.deepEqual(colours(15, 4), new Set(["194,24,91", "255,227,238"]));
  assert.ok(!colours(15, 18).has("194,24,91"));
  assert.equal(colours(5, 2).size, 1);
  await page.keyboard.press("n"); // divided by the greatest weight of the row, they stay what they are
  await settled(page);
  assert.deepEqual(new Set((await shapesOf(page)).map((shape) => shape.kind === "text" && shape.text)).has("NaN"), true);
  await page.keyboard.press("Escape");
  assert.equal(await page.locator(".badge.broken").count(), 1);
  await page.keyboard.press("l");
  await settled(page);
  assert.match((await page.locator(".level").textContent()) ?? "", / · 8 of these queries attend to NaN and have no lin/);
  quiet();
});

test("words say which tokens they leave out, and how much weight lies on these", async () => {
  const { page, quiet } = await open(bench, "special/#view=lines");
  await settled(page);
  assert.equal(await page.locator(".left-out:visible").count(), 0);
  await page.keyboard.press("w");
  await settled(page);
  await page.waitForSelector(".left-out:visible");
  assert.equal(
    await page.locator(".left-out:visible").textContent(),
    "Words leaves out tokens of no word: 2 of 6 queries ([CLS], [SEP]) and 2 of 6 keys ([CLS], [SEP]). " +
      "Rows then add up to less than 100 %.",
  );
  assert.match(
    (await page.locator(".level").textContent()) ?? "",
    / · 50 % of the weight of these queries lies in this window, 50 % on tokens of no word, which Words leaves out$/,
  );
  await page.keyboard.press("w");
  await settled(page);
  assert.equal(await page.locator(".left-out:visible").count(), 0);
  assert.match((await page.locator(".level").textContent()) ?? "", / · 100 % of the weight of these queries lies in this w/);
  quiet();
});

test("a metric and a role of one name are two orders", async () => {
  const { page, quiet } = await open(bench, "short/");
  const options = await page.getByLabel("Order").locator("option").evaluateAll((all) =>
    all.map((option) => [(option as HTMLOptionElement).value, option.textContent]),
  );
  for (const at of [0, 1]) assert.equal(new Set(options.map((option) => option[at])).size, options.length);
  assert.ok(options.some(([value]) => value === "-sink"));
  await page.getByLabel("Order").selectOption("-role:sink");
  await settled(page);
  assert.match((await page.locator(".thumb .value").first().textContent()) ?? "", /^0\.\d{4} score of sink$/);
  const first = (await page.locator("button.thumb").first().locator(".told").textContent()) ?? "";
  assert.match(first, /sink: score/);
  quiet();
});

test("compare shows the head that was open where none is pinned, and names what it subtracts", async () => {
  const { page, quiet } = await open(bench, "small/#view=head&map=1&head=2");
  await settled(page);
  await page.keyboard.press("c");
  await settled(page);
  assert.deepEqual(await page.locator(".pane h2").allTextContents(), ["A · h.1 · head 2"]);
  assert.match((await page.locator(".hint:visible").textContent()) ?? "", /^No head is pinned: this is the head /);
  await page.goto(`${page.url().split("#")[0]}#view=compare&pins=0.1,1.2&difference=1`);
  await page.waitForFunction(() => document.querySelectorAll(".pane").length === 3);
  await settled(page);
  assert.deepEqual(await page.locator(".pane h2").allTextContents(), [
    "A · h.0 · head 1",
    "B · h.1 · head 2",
    "A − B · h.0 · head 1  −  h.1 · head 2",
  ]);
  assert.equal(await page.locator(".hint:visible").count(), 0);
  quiet();
});
