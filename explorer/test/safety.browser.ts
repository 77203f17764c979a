import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { figure } from "../src/text.ts";
import { type Bench, hashOf, open, plotBox, plotPixels, type Root, settled, start, WEB } from "./harness.ts";
import { staticPage } from "./static.ts";
import { HOSTILE } from "./synthetic.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

const PLACES = [
  "small/#view=head&head=3",
  "small/#view=head&head=1&scale=log&colours=cividis&normalise=1",
  "small/#view=head&head=2&frame=30.21,29.87,19.3&scale=linear",
  "long/#view=head&reduce=mean&theme=dark",
  "long/#view=head&frame=70000.3,69950.7,900",
];

for (const place of PLACES) {
  test(`GPU and canvas give the same picture of ${place}`, async () => {
    const pictures = [];
    const drawing = { webgl: await start(0, true), canvas: bench };
    for (const renderer of ["webgl", "canvas"] as const) {
      const { page, quiet } = await open(drawing[renderer], place, { renderer });
      await settled(page);
      const used = await page.evaluate(
        () => (document.getElementById("regard-explorer") as unknown as Root).explorer.view.panel.painter.name,
      );
      assert.equal(used, renderer);
      pictures.push(await plotPixels(page));
      quiet();
      await page.close();
    }
    await drawing.webgl.close();
    const [gpu, canvas] = pictures;
    assert.deepEqual([gpu.width, gpu.height], [canvas.width, canvas.height]);
    // In float32 and in float64 an entry of the table, or the side of an edge that a pixel lies on, may differ.
    let different = 0;
    for (let i = 0; i < gpu.data.length; i += 4) {
      if ([0, 1, 2].some((k) => Math.abs(gpu.data[i + k] - canvas.data[i + k]) > 6)) different += 1;
    }
    const colours = new Set(canvas.data.filter((_, i) => i % 4 === 1));
    assert.ok(colours.size > 3, "the picture is empty");
    assert.ok(different <= (gpu.data.length / 4) * 0.0005, `${different} of ${gpu.data.length / 4} pixels differ`);
  });
}

test("hostile tokens, names and roles are text in every view", async () => {
  for (const view of ["grid", "head&at=15,6", "lines", "compare&pins=0.0", "table"]) {
    const { page, quiet } = await open(bench, `hostile/#view=${view}`);
    await settled(page);
    assert.equal(await page.evaluate(() => (window as unknown as { harmed?: number }).harmed), undefined);
    assert.equal(await page.locator(".regard-explorer :is(img, script, svg, i, b, u, iframe)").count(), 0);
    assert.equal(await page.locator("h1").textContent(), "<b>hostile</b>⟨U+202E⟩ title");
    assert.ok(
      ((await page.locator(".regard-explorer").textContent()) ?? "").length < 20_000,
      "a long token was not cut",
    );
    quiet();
    await page.close();
  }
});

test("the tip shows a hostile token as text", async () => {
  const { page, quiet } = await open(bench, "hostile/#view=head");
  await settled(page);
  const box = await plotBox(page);
  await page.mouse.move(box.x + box.width * 0.01, box.y + (box.height * 2.5) / 16);
  await settled(page);
  const told = await page.locator(".tip-token").allTextContents();
  assert.deepEqual(told, ["query 2  ⟨U+202E⟩gnp.exe", "key 0  <img␣src=x␣onerror=window.h…"]);
  await page.mouse.move(box.x + box.width * 0.98, box.y + 4);
  assert.equal(await page.locator(".tip strong").textContent(), "no pair: the mask forbids it");
  quiet();
});

test("pictures and tables to take away", async () => {
  const { page, quiet } = await open(bench, "hostile/#view=head");
  await settled(page);
  const saved = async (kind: string) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.locator(`[data-save=${kind}]`).click()]);
    return readFileSync(await download.path());
  };
  const png = await saved("png");
  assert.equal(png.subarray(1, 4).toString(), "PNG");
  assert.ok(png.readUInt32BE(16) > 1000, "the PNG has twice the pixels of the screen");
  const svg = (await saved("svg")).toString();
  const parsed = await page.evaluate((text) => {
    const document_ = new DOMParser().parseFromString(text, "image/svg+xml");
    return {
      error: document_.querySelector("parsererror")?.textContent,
      images: document_.querySelectorAll("image").length,
      texts: [...document_.querySelectorAll("text")].map((node) => node.textContent),
      scripts: document_.querySelectorAll("script").length,
    };
  }, svg);
  assert.equal(parsed.error, undefined);
  assert.equal(parsed.scripts, 0);
  assert.equal(parsed.images, 2);
  assert.ok(parsed.texts.includes("=1+1") && parsed.texts.includes("query ↓"));
  const csv = (await saved("csv")).toString().split("\r\n");
  assert.equal(csv.length, HOSTILE.length + 1);
  const weight = Math.fround(bench.served.atlas("hostile").maps[0].weight(0, 15, 3));
  assert.equal(Number(csv[16].split('",')[1].split(",")[3]), weight);
  assert.ok(csv[1].endsWith(",,"), "pairs that do not exist are empty");
  const npz = await saved("npz");
  assert.equal(npz.toString("latin1", 0, 4), "PK\x03\x04");
  const weights = npz.indexOf("weights.npy") + 128 + "weights.npy".length;
  assert.equal(npz.readFloatLE(weights + 4 * (15 * (csv.length - 1) + 3)), weight);
  quiet();
  await page.goto(`${bench.served.address}/small/?renderer=canvas#view=table`);
  await page.waitForSelector(".table-view");
  assert.equal((await saved("csv")).toString().split("\r\n").length, 9);
  for (const view of ["grid", "lines", "compare&pins=0.0,0.1&difference=1"]) {
    await page.goto(`${bench.served.address}/small/?renderer=canvas&${view.length}#view=${view}`);
    await page.waitForSelector(".regard-explorer main > div");
    await settled(page);
    assert.match((await saved("svg")).toString(), /<(text|path|image) /);
  }
});

test("one self-contained file works from the disk", async () => {
  const folder = mkdtempSync(join(tmpdir(), "regard-"));
  const file = join(folder, "page.html");
  writeFileSync(file, staticPage(bench.served.atlas("small")));
  const address = pathToFileURL(file).href;
  const { page, quiet } = await open(bench, `${address}#view=head&map=1&head=2&at=20,4`);
  await settled(page);
  assert.equal(await page.locator(".level").textContent(), "exact weights");
  const weight = Math.fround(bench.served.atlas("small").maps[1].weight(2, 20, 4));
  assert.match((await page.locator(".status").textContent()) ?? "", new RegExp(`${figure(weight)}$`));
  await page.keyboard.press("Escape");
  await settled(page);
  assert.equal(await page.locator("canvas.drawn").count(), 8);
  await page.goto(`${address}#view=head&map=0&head=0`);
  await page.waitForSelector(".head-view");
  await settled(page);
  assert.match((await page.locator(".level").textContent()) ?? "", /^max of 2 × 2 cells/);
  const aside = (await page.locator("aside").textContent()) ?? "";
  assert.match(aside, /Of this head the page has cells of 2 × 2 weights and more, and no single weights/);
  assert.match(aside, /Click a cell/);
  assert.equal(
    await page.locator(".part").textContent(),
    "Exact weights of 7 of 8 heads are in this page, of the others cells of 2 × 2 weights and more.",
  );
  quiet();
  rmSync(folder, { recursive: true });
});

test("one file opens as it was told to, and leads back there", async () => {
  const folder = mkdtempSync(join(tmpdir(), "regard-"));
  const file = join(folder, "page.html");
  writeFileSync(file, staticPage(bench.served.atlas("small"), "view=head&map=1&head=2"));
  const address = pathToFileURL(file).href;
  const { page, quiet } = await open(bench, address);
  const heading = page.locator("aside h2");
  assert.equal(await heading.textContent(), "h.1 · head 2");
  await page.locator(".plot").press("k");
  await page.getByText("h.1 · head 3").first().waitFor();
  assert.equal(await hashOf(page), "#view=head&map=1&head=3");
  await page.goBack();
  await page.getByText("h.1 · head 2").first().waitFor();
  await page.locator(".plot").press("Escape");
  await page.waitForSelector(".grid-view");
  await page.goto(`${address}#view=grid`);
  await page.reload();
  await page.waitForSelector(".grid-view");
  await page.goto(`${address}?#head=1&view=head`);
  assert.equal(await heading.textContent(), "h.0 · head 1");
  quiet();
  rmSync(folder, { recursive: true });
});

test("a source that fails is told of in words", async () => {
  const { page } = await open(bench, "small/");
  await page.route("**/pooled?*", (route) =>
    route.fulfill({ status: 400, contentType: "application/json", body: '{"error": "the atlas is truncated"}' }),
  );
  await page.keyboard.press("h");
  await page.keyboard.press("r");
  await page.goto(`${bench.served.address}/small/?renderer=canvas&again`);
  await page.waitForFunction(
    () => document.querySelector(".status")?.textContent === "The source says: the atlas is truncated",
  );
  await page.route("**/meta", (route) =>
    route.fulfill({ status: 200, contentType: "application/json", body: '{"maps": []}' }),
  );
  await page.goto(`${bench.served.address}/small/?renderer=canvas&third`);
  await page.waitForSelector(".regard-failure");
  assert.match((await page.locator(".regard-failure").textContent()) ?? "", /no attention map/);
});

test("hostile texts and names of atlases are shown as text", async () => {
  const { page, quiet } = await open(bench, "live/");
  const text = "<img src=x onerror=window.harmed=1> </textarea><script>window.harmed=1</script> \u202eabc it";
  await page.locator(".rerun textarea").fill(text);
  await page.keyboard.press("Enter");
  await page.getByRole("button", { name: "Compare with before" }).click();
  await page.waitForSelector(".pane");
  await settled(page);
  assert.equal(await page.locator(".rerun textarea").inputValue(), text);
  assert.equal(await page.evaluate(() => (window as unknown as { harmed?: number }).harmed), undefined);
  assert.equal(await page.locator(".regard-explorer :is(img, script, iframe)").count(), 0);
  assert.match((await page.locator(".chooser option").first().textContent()) ?? "", /^now · <img src=x/);
  quiet();
});

test("nothing in the page needs a policy less strict", async () => {
  const script = readFileSync(join(WEB, "explorer.js"), "utf8");
  for (const forbidden of [
    /innerHTML/,
    /outerHTML/,
    /insertAdjacentHTML/,
    /document\.write/,
    /\beval\(/,
    /new Function/,
    /https?:\/\/(?!www\.w3\.org\/2000\/svg)/,
  ]) {
    assert.doesNotMatch(script, forbidden);
  }
  const { page, quiet } = await open(bench, "small/#view=head");
  await settled(page);
  assert.equal(
    await page.evaluate(() => (document.getElementById("regard-explorer") as unknown as Root).explorer.loading.error),
    "",
  );
  quiet();
});
