import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { figure } from "../src/text.ts";
import { axeFaults } from "./chromium.ts";
import { effectOf } from "./effects.ts";
import { type Bench, open, settled, start } from "./harness.ts";
import { keptOfHead } from "./measures.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

const opener = (page: Page) => page.locator(".opener");
const choice = (page: Page, name: string) => page.getByRole("combobox", { name });
const cost = (page: Page) => page.locator(".told-cost");
const runButton = (page: Page) => page.getByRole("button", { name: "Switch off and run" });

/** Opens the panel, chooses, and waits until the cost is told. */
async function choose(page: Page, what: string, by = "zero", text = ""): Promise<void> {
  if ((await opener(page).getAttribute("aria-expanded")) !== "true") await opener(page).click();
  await choice(page, "Switch off").selectOption(what);
  await choice(page, "replaced by").selectOption(by);
  if (text) await page.getByRole("textbox", { name: "the other text" }).fill(text);
  await page.waitForFunction(() => document.querySelector(".told-cost")?.textContent?.startsWith("Costs"));
}

async function run(page: Page): Promise<void> {
  const count = await page.locator("article.effect").count();
  await runButton(page).click();
  await page.waitForFunction(
    (count) => document.querySelectorAll("article.effect").length > count && !document.querySelector("article.effect progress"),
    count,
  );
}

const newest = (page: Page) => page.locator("article.effect").first();

test("a head is switched off: its cost before, what moves after", async () => {
  const { page, quiet } = await open(bench, "live/#view=head&head=2&at=2,1");
  await settled(page);
  assert.equal(await page.locator(".effects").isVisible(), false);
  await opener(page).click();
  assert.equal(await opener(page).getAttribute("aria-expanded"), "true");
  assert.equal(await runButton(page).isDisabled(), true, "not before the cost is told");
  await choose(page, "head");
  assert.equal(await cost(page).textContent(), "Costs 1 run of the model, about 0.3 s.");
  assert.match((await page.locator(".effects .bar").textContent()) ?? "", /Compared: the state of token 2 “late” after the last layer\./);
  await run(page);
  const value = effectOf("encoder", 0, 2);
  assert.equal(await newest(page).locator("h2").textContent(), "Without head 2 of h.0, replaced by zero");
  assert.equal(
    await newest(page).locator(".moved").textContent(),
    `The state of token 2 “late” after the last layer moves by ${figure(value)} (1 − cos), ${figure(2 * value)} of its length.`,
  );
  quiet();
});

test("layers, tokens and links are what is shown and kept; what is not kept is not offered", async () => {
  const { page, quiet } = await open(bench, "live/#view=head&map=1&head=3");
  const told: unknown[] = [];
  page.on("request", (request) => request.url().endsWith("/effects") && told.push(request.postDataJSON()));
  await opener(page).click();
  const options = () => choice(page, "Switch off").locator("option").evaluateAll((all) => all.map((one) => `${(one as HTMLOptionElement).disabled ? "–" : "+"} ${one.textContent}`));
  assert.deepEqual(await options(), [
    "+ head 3 of h.1",
    "+ all 4 heads of h.1",
    "– a token: keep a token first",
    "– a link in this head: keep a query and a key first",
    "– a link in all heads: keep a query and a key first",
    "+ all heads, one by one",
  ]);
  await page.goto(`${page.url().split("#")[0]}#view=head&map=1&head=3&at=2,1`);
  await page.waitForFunction(() => document.querySelector(".effects option[value=link]")?.textContent === "link “late” → “was” in head 3 of h.1");
  for (const what of ["head", "layer", "token", "link", "links"]) {
    await choose(page, what);
    await run(page);
  }
  const name = "transformer.h.1.attn";
  const common = { text: "it was late .", token: 2, replace: "zero", reference: null };
  const terms = (module: string | null, heads: number[] | null, queries: number[] | null, keys: number[] | null) => ({ ...common, terms: { module, heads, queries, keys } });
  assert.deepEqual(told, [
    terms(name, [3], null, null),
    terms(name, null, null, null),
    terms(null, null, null, [1]),
    terms(name, [3], [2], [1]),
    terms(null, null, [2], [1]),
  ]);
  quiet();
});

test("words are switched off with all of their tokens", async () => {
  // The third source word, "sleeps", is of two tokens; a translator's own layer reads it.
  const { page, quiet } = await open(bench, "translates/#view=head&map=1&head=0&words=1&at=,3");
  const told: { terms: unknown; token: unknown }[] = [];
  page.on("request", (request) => request.url().endsWith("/effects") && told.push(request.postDataJSON()));
  await choose(page, "token");
  assert.equal(await choice(page, "Switch off").locator("option:checked").textContent(), "token “sleeps” in decoder.0.cross_attention");
  await run(page);
  assert.deepEqual(told.map(({ terms, token }) => [terms, token]), [[{ module: "decoder.0.cross_attention", heads: null, queries: null, keys: [3, 4] }, null]]);
  quiet();
});

test("all heads, one by one: progress, a ranked table, and an order of the heads", async () => {
  const { page, quiet } = await open(bench, "live/#at=2,1");
  await choose(page, "all");
  assert.equal(await cost(page).textContent(), "Costs 8 runs of the model, about 2.0 s.");
  let release = () => undefined as void;
  bench.served.hold = new Promise((resolve) => (release = resolve));
  await runButton(page).click();
  await page.waitForSelector("article.effect progress");
  // Meanwhile the page is there for everything else.
  await page.getByRole("button", { name: "Table" }).click();
  assert.equal(await page.locator(".table-view").isVisible(), true);
  await page.getByRole("button", { name: "Heads", exact: true }).click();
  release();
  bench.served.hold = new Promise((resolve) => (release = resolve));
  // What has the focus in the growing table keeps it.
  await newest(page).locator("tbody button").first().focus();
  const focused = await page.evaluate(() => document.activeElement?.textContent);
  bench.served.hold = undefined;
  release();
  await page.waitForFunction(() => document.querySelector("article.effect")?.textContent?.includes("All 8 heads are measured."));
  assert.equal(await page.evaluate(() => document.activeElement?.textContent), focused);
  const all = [0, 1].flatMap((map) => [0, 1, 2, 3].map((head) => ({ map, head, value: effectOf("encoder", map, head) })));
  const sorted = [...all].sort((a, b) => b.value - a.value);
  const cells = (column: string) => newest(page).locator(`tbody ${column}`).allTextContents();
  assert.deepEqual(await cells("th"), sorted.map(({ map, head }) => `h.${map} · head ${head}`));
  assert.deepEqual(await cells("td:nth-child(2)"), sorted.map(({ value }) => figure(value)));
  await page.getByRole("button", { name: "Order heads by effect" }).click();
  await settled(page);
  assert.deepEqual(
    await page.locator(".thumb .kept-value").allTextContents(),
    sorted.map(({ value }, at) => `${value.toFixed(4)} #${at + 1}`),
  );
  assert.equal(await choice(page, "Order").inputValue(), "-kept:effect");
  await newest(page).locator("tbody button").first().click();
  await settled(page);
  assert.match(await page.locator("aside h2").textContent() ?? "", new RegExp(`^h\\.${sorted[0].map} · head ${sorted[0].head}$`));
  // The table of all heads has it as a column.
  await page.keyboard.press("t");
  await settled(page);
  assert.deepEqual(await page.locator(".table-view thead th").allTextContents().then((names) => names.slice(3, 7)), ["kept", "contribution", "effect ↓", "entropy"]);
  quiet();
});

test("a run is cancelled, and the next one goes through", async () => {
  const { page, quiet } = await open(bench, "live/#at=2,1");
  await choose(page, "all");
  bench.served.hold = new Promise(() => undefined);
  await runButton(page).click();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.waitForFunction(() => document.querySelector("article.effect")?.textContent?.includes("Cancelled after 0."));
  bench.served.hold = undefined;
  await choose(page, "head");
  await run(page);
  assert.equal(await newest(page).locator(".moved").count(), 1);
  quiet();
});

test("a language model tells its next tokens, a translator what it says", async () => {
  const { page, quiet } = await open(bench, "predicts/#view=head&at=3,");
  await choose(page, "head");
  assert.match((await page.locator(".effects .bar").textContent()) ?? "", /Compared: what follows token 3 “\.”\./);
  await run(page);
  const value = effectOf("language model", 0, 0);
  assert.equal(await newest(page).locator(".moved").textContent(), `The logit of “down” changes by ${value < 0 ? "−" : "+"}${figure(Math.abs(value))}.`);
  const cells = await newest(page).locator("tbody td").allTextContents();
  assert.deepEqual(cells, ["down", "0.5000", "up", "0.7500", "␣<b>up</b>", "0.2500", "down", "0.1250"]);
  quiet();
  const { page: other, quiet: alsoQuiet } = await open(bench, "translates/#view=head&map=0&head=0");
  await choose(other, "layer");
  await run(other);
  assert.match((await newest(other).locator(".moved").textContent()) ?? "", /^The translation (changes|stays the same)\. The log-probability of what it said before changes by [+−]\d\.\d{4}\.$/);
  await choose(other, "all");
  await run(other);
  const changed = await newest(other).locator("tbody td:nth-child(4)").allTextContents();
  assert.ok(changed.includes("the same") && changed.includes("le chien est là"), changed.join());
  assert.equal(await choice(other, "replaced by").locator("option[value=before]").isDisabled(), true);
  alsoQuiet();
});

test("a patch says which tokens are aligned and which are not; a mean needs its text", async () => {
  const { page, errors } = await open(bench, "live/#view=head&at=2,1");
  await opener(page).click();
  await choice(page, "replaced by").selectOption("mean");
  await page.waitForFunction(() => document.querySelector(".told-cost")?.textContent === "Write the other text first.");
  assert.equal(await runButton(page).isDisabled(), true);
  await choose(page, "head", "before", "it rained");
  await run(page);
  assert.equal(await newest(page).locator("h2").textContent(), "With head 0 of h.0 as in “it rained”");
  assert.equal(
    await newest(page).locator("p.muted").textContent(),
    "1 token of the two texts aligned; left as they are, since the other text does not have them: 1 “was”, 2 “late”, 3 “.”; not put in, since this text does not have them: 1 “rained” of the other text.",
  );
  assert.deepEqual(errors, []);
  await page.getByRole("textbox", { name: "the other text" }).fill("fail");
  await page.waitForFunction(() => document.querySelector(".told-cost")?.textContent === "the model cannot <b>read</b> this");
  assert.equal(await cost(page).getAttribute("role"), "alert");
  assert.equal(await runButton(page).isDisabled(), true);
});

test("a record without its model has no button, and says why", async () => {
  for (const path of ["small/", "steps/"]) {
    const { page, quiet } = await open(bench, path);
    assert.equal(await page.getByRole("button", { name: /Switch off/ }).count(), 0);
    assert.equal(await opener(page).locator("summary").textContent(), "Switching off needs the model");
    await opener(page).locator("summary").click();
    assert.ok(await page.getByText("This page has a record alone. regard explore --model FOLDER “a sentence” has both.").isVisible());
    await page.keyboard.press("z");
    assert.equal(await page.locator(".effects").isVisible(), false);
    await page.goto(`${page.url().split("#")[0]}#order=-kept:effect`);
    await page.getByText("No order by effect of switching off: it needs the model, which is not here.").waitFor();
    if (path === "small/") {
      await page.goto(`${page.url().split("#")[0]}#at=3,2&order=-kept:change`);
      await page.getByText("No order by change of what is kept: there is no other record beside this one.").waitFor();
    }
    quiet();
  }
});

test("keys alone: open, choose, run, close", async () => {
  const { page, quiet } = await open(bench, "live/#at=2,1");
  await settled(page);
  await page.keyboard.press("z");
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.effect), "switched");
  await page.keyboard.press("ArrowDown"); // all heads of the layer
  await page.waitForFunction(() => document.querySelector(".told-cost")?.textContent?.startsWith("Costs"));
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.effect), "switched");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.effect), "run");
  await page.keyboard.press("Enter");
  await page.waitForSelector("article.effect .moved");
  assert.equal(await newest(page).locator("h2").textContent(), "Without all 4 heads of h.0, replaced by zero");
  await page.keyboard.press("z");
  assert.equal(await page.evaluate(() => document.activeElement?.textContent), "Switch off …");
  quiet();
});

test("a record of another text than the model reads is told; Escape closes the panel", async () => {
  const { page, quiet } = await open(bench, "strange/#view=head");
  await opener(page).click();
  await page.waitForFunction(() => document.querySelector(".told-cost")?.textContent?.startsWith("The model reads 4 tokens here, and the record has 6: "));
  assert.equal(await runButton(page).isDisabled(), true);
  await page.keyboard.press("Escape");
  assert.equal(await page.locator(".effects").isVisible(), false);
  assert.equal(await page.locator(".head-view").count(), 1, "the view stays");
  quiet();
});

test("touch, a narrow screen, both schemes, and readers", async () => {
  for (const scheme of ["light", "dark"] as const) {
    const { page, quiet } = await open(bench, "live/#view=head&at=2,1", { touch: true, scheme, size: { width: 390, height: 844 } });
    await opener(page).tap();
    await choose(page, "all");
    await runButton(page).tap();
    await page.waitForFunction(() => document.querySelector("article.effect")?.textContent?.includes("All 8 heads"));
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    for (const one of await page.locator(".effects :is(button, select)").all()) {
      const box = await one.boundingBox();
      assert.ok(box && box.x >= 0 && box.x + box.width <= 390, await one.textContent() ?? "");
    }
    assert.deepEqual(await axeFaults(page), []);
    quiet();
  }
});

test("changes since the text before, and why there are none", async () => {
  const { page } = await open(bench, "live/#at=2,1");
  const rerun = async (text: string) => {
    await page.locator(".rerun textarea").fill(text);
    await page.locator(".rerun textarea").press("Enter");
    await page.waitForFunction((text) => document.querySelector("h1")?.textContent === text, text);
    await settled(page);
  };
  await rerun("it was cold .");
  await choice(page, "Order").selectOption("-kept:change");
  await settled(page);
  assert.match((await page.locator(".count").textContent()) ?? "", /Under each: .*, less that of the text before, and behind # its rank among 8 heads\.$/);
  await rerun("it was not cold at all .");
  await page.goto(`${page.url().split("#")[0]}#at=2,1&order=-kept:change`);
  await page.waitForFunction(() => document.querySelector(".count")?.textContent?.includes("No order by change of what is kept: Error: changes are told of texts of one length."));
});

test("steps of a training: the most changed heads first", async () => {
  const { page, quiet } = await open(bench, "steps/#atlas=1&at=5,2&order=-kept:change");
  await settled(page);
  await page.waitForFunction(() => document.querySelectorAll(".thumb .kept-value:not([hidden])").length === 8);
  const values = await page.locator(".thumb .kept-value").allTextContents();
  const atlases = [0, 1].map((step) => bench.served.atlasOf("steps", step));
  const expected = atlases[1].maps.flatMap((map, at) =>
    [0, 1, 2, 3].map((head) => keptOfHead(map, head, [5], [2], "weight") - keptOfHead(atlases[0].maps[at], head, [5], [2], "weight")),
  );
  const sizes = expected.map(Math.abs).sort((a, b) => b - a);
  assert.equal(values.length, 8);
  values.forEach((value, at) => {
    const size = Number(value.replace(/^[+−]/, "").split(" ")[0]);
    assert.ok(Math.abs(size - sizes[at]) < 1e-3, `${value} and ${sizes[at]}`);
    assert.match(value, /^[+−]/);
  });
  quiet();
});
