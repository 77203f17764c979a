import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { type Bench, hashOf, open, start } from "./harness.ts";
import { keptOfHead } from "./measures.ts";
import { staticPage } from "./static.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

/** What the page's own module gives; the tests know it only by its address. */
interface Module {
  mount(element: Element, source: unknown, state?: string): Promise<{ state: { view: string; head: number } }>;
  HttpSource: new (base: string) => Record<string, (...args: unknown[]) => Promise<unknown>>;
  default: { render(widget: { model: unknown; el: HTMLElement }): Promise<() => void> };
}

/** A model of anywidget in the page: it answers from the server, and keeps two atlases after each run. */
async function widget(page: Page, settings: { state: string; rerun: number; hides?: string }): Promise<void> {
  await page.evaluate(async ({ state, rerun, hides = "" }) => {
    const module = (await import(new URL("explorer.js", location.href).href)) as Module;
    const source = new module.HttpSource(new URL("0/", location.href).href);
    const names = ["first"];
    const numbers = [0];
    const asked: string[] = [];
    let answer: (message: unknown, buffers: DataView[]) => void = () => undefined;
    const listed = () => ({ atlases: numbers.map((number, at) => ({ number, name: names[at] })), rerun });
    const own: Record<string, (named: Record<string, never>) => unknown> = {
      atlases: listed,
      rerun: ({ text }) => {
        if (text === "fail") throw new Error("the model <b>fails</b>");
        names.unshift(text);
        numbers.unshift(numbers[0] + 1);
        names.length = numbers.length = 2;
        return listed();
      },
    };
    const order: Record<string, string[]> = {
      meta: [],
      tokens: ["map", "side", "start", "stop"],
      pooled: ["map", "head", "level", "reduce"],
      profile: ["map", "head", "which"],
    };
    const traits: Record<string, unknown> = { state, hides, height: 800 };
    const changed = new Set<() => void>();
    const model = {
      traits,
      dead: false,
      get: (name: string) => traits[name],
      set: (name: string, value: unknown) => {
        traits[name] = value;
        for (const listener of changed) listener();
      },
      save_changes: () => undefined,
      on: (event: string, listener: typeof answer) => {
        if (event === "change:state") changed.add(listener as unknown as () => void);
        else answer = listener;
      },
      off: (event: string) => {
        if (event === "change:state") changed.clear();
        else answer = () => undefined;
      },
      send: (message: { id: string; method: string; arguments: Record<string, never> }) => {
        if (model.dead) throw new Error("Cannot send");
        void model.answer(message);
      },
      answer: async (message: { id: string; method: string; arguments: Record<string, never> }) => {
        const { id, method, arguments: named } = message;
        asked.push(method);
        try {
          const { rows, columns, map, head } = named as unknown as Record<string, number[]>;
          let result: unknown;
          if (method in own) result = own[method](named);
          else if (!numbers.includes(named.atlas)) throw new Error(`there is no atlas ${named.atlas}`);
          else if (method === "weights") {
            const region = { row0: rows[0], row1: rows[1], column0: columns[0], column1: columns[1] };
            result = await source.weights(map, head, region);
          } else if (!(method in order)) {
            // As Python has them: asked of the server, each atlas being the one that is there.
            const query = Object.entries({ ...named, ...("other" in named ? { other: 0 } : {}) }).filter(([name]) => name !== "atlas");
            const response = await fetch(`0/${method}?${new URLSearchParams(query.map(([name, value]) => [name, String(value)]))}`);
            result = method === "changes" ? await response.json() : new Float32Array(await response.arrayBuffer());
          } else result = await source[method](...order[method].map((name) => named[name]));
          // Behind a byte of something else, as in a message of many buffers.
          if (result instanceof Float32Array) {
            const bytes = new Uint8Array([9, ...new Uint8Array(result.buffer)]);
            answer({ id }, [new DataView(bytes.buffer, 1)]);
          } else answer({ id, result: JSON.parse(JSON.stringify(result)) }, []);
        } catch (error) {
          answer({ id, error: String((error as Error).message) }, []);
        }
      },
    };
    const el = document.createElement("div");
    el.id = "cell";
    // A notebook: cells, of which one shows a picture and the widget behind it.
    const output = document.createElement("div");
    output.append(...[...document.querySelectorAll("img")], el);
    document.body.replaceChildren(...[...document.querySelectorAll("textarea.next")], output);
    Object.assign(window, { asked, model, destroy: await module.default.render({ model, el }) });
  }, settings);
}

test("a notebook's messages", async () => {
  const { page, quiet } = await open(bench, "small/");
  await widget(page, { state: "view=head&head=2&at=9,4", rerun: 0 });
  await page.waitForFunction(() => /0\.\d{4}$/.test(document.querySelector("#cell .status")?.textContent ?? ""));
  assert.equal(await page.locator("#cell aside h2").textContent(), "h.0 · head 2");
  assert.equal(await page.locator("#cell .collection").isVisible(), false);
  assert.equal((await page.locator("#cell .regard-explorer").boundingBox())?.height, 800);
  await page.waitForFunction(() => {
    const { asked } = window as unknown as { asked: string[] };
    return ["atlases", "meta", "profile", "tokens", "weights"].every((method) => asked.includes(method));
  });
  await page.evaluate(() => (window as unknown as { destroy: () => void }).destroy());
  assert.equal(await page.locator("#cell canvas").count(), 0);
  quiet();
});

/** What a test hands to the page's own model and reads from it. */
interface Notebook {
  model: { traits: Record<string, unknown>; dead: boolean; set(name: string, value: unknown): void };
  pressed: string[];
}

test("a notebook keeps its focus, and its keys", async () => {
  const { page, quiet } = await open(bench, "small/");
  await page.evaluate(() => {
    const next = document.createElement("textarea");
    next.className = "next";
    document.body.append(next);
    next.focus();
    const pressed: string[] = [];
    document.addEventListener("keydown", ({ key, ctrlKey }) => pressed.push(`${ctrlKey ? "Control+" : ""}${key}`));
    Object.assign(window, { pressed });
  });
  await widget(page, { state: "view=grid", rerun: 1000 });
  await page.evaluate(() => document.querySelector<HTMLElement>(".next")?.focus());
  await page.evaluate(() => (window as unknown as Notebook).model.set("state", "view=head&head=1"));
  await page.locator("#cell .head-view").waitFor();
  assert.equal(await page.evaluate(() => document.activeElement?.className), "next");
  await page.locator("#cell .plot").press("m");
  await page.locator("#cell select").first().press("x");
  await page.locator("#cell .rerun textarea").press("d");
  await page.locator("#cell .plot").press("?");
  await page.keyboard.press("b");
  await page.keyboard.press("Control+s");
  await page.keyboard.press("Shift+Enter");
  assert.deepEqual(await page.evaluate(() => (window as unknown as Notebook).pressed), [
    "Control+Control",
    "Control+s",
    "Enter",
  ]);
  quiet();
});

test("a notebook's state is that of the page, both ways", async () => {
  const { page, quiet } = await open(bench, "small/");
  await widget(page, { state: "view=head&head=2", rerun: 0 });
  await page.locator("#cell .plot").press("k");
  await page.getByText("h.0 · head 3").first().waitFor();
  const state = () => page.evaluate(() => (window as unknown as Notebook).model.traits.state);
  assert.equal(await state(), "view=head&head=3");
  await page.evaluate(() => (window as unknown as Notebook).model.set("state", "view=lines&map=1&top=5"));
  await page.locator("#cell .lines-view").waitFor();
  assert.equal(await state(), "view=lines&map=1&top=5");
  await page.locator("#cell [aria-label=help]").click();
  assert.match((await page.locator("#cell dialog").textContent()) ?? "", /`shown\.state`\.$/);
  quiet();
});

test("a notebook's theme is the explorer's", async () => {
  const { page, quiet } = await open(bench, "small/");
  await page.evaluate(() => {
    document.body.dataset.jpThemeLight = "false";
  });
  await widget(page, { state: "", rerun: 0 });
  const theme = () => page.locator("#cell .regard-explorer").getAttribute("data-theme");
  assert.equal(await theme(), "dark");
  await page.evaluate(() => {
    document.body.dataset.jpThemeLight = "true";
  });
  await page.waitForSelector("#cell .regard-explorer[data-theme=light]");
  quiet();
});

test("the picture of a saved notebook is hidden where the widget lives", async () => {
  const { page, quiet } = await open(bench, "small/");
  const data = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==";
  await page.evaluate((data) => {
    const still = document.createElement("img");
    still.src = `data:image/png;base64,${data}\n`;
    document.body.append(still);
  }, data);
  await widget(page, { state: "", rerun: 0, hides: data.slice(-60) });
  await page.locator("#cell button.thumb").first().waitFor();
  assert.equal(await page.locator("img").isVisible(), false);
  quiet();
});

test("a kernel that is gone is told", async () => {
  const { page } = await open(bench, "small/");
  await widget(page, { state: "", rerun: 1000 });
  await page.locator("#cell button.thumb").first().waitFor();
  await page.evaluate(() => {
    (window as unknown as Notebook).model.dead = true;
  });
  await page.locator("#cell .rerun textarea").fill("It was late.");
  await page.locator("#cell .rerun textarea").press("Enter");
  await page.getByRole("alert").getByText("the kernel that made this is gone; run the cell again").waitFor();
  await page.close();
});

test("another sentence in a notebook", async () => {
  const { page, quiet } = await open(bench, "small/");
  await widget(page, { state: "view=head&head=1&frame=4,4,9", rerun: 1000 });
  const box = page.locator("#cell .rerun textarea");
  assert.equal(await box.inputValue(), "first");
  await box.fill("It was <i>tired</i>.");
  await box.press("Enter");
  await page.getByText("Compare with before").waitFor();
  assert.equal(await page.locator("#cell .head-view").count(), 1);
  await box.fill("fail");
  await box.press("Enter");
  await page.getByRole("alert").getByText("the model <b>fails</b>").waitFor();
  await page.getByText("Compare with before").click();
  await page.getByText("now − before · h.0 · head 1").waitFor();
  const labels = await page.locator("#cell .chooser option").allTextContents();
  assert.deepEqual(labels, ["now · It was <i>tired</i>.", "before · first"]);
  quiet();
});

test("contributions and orders by what is kept in a notebook, and why nothing is switched off", async () => {
  const { page, quiet } = await open(bench, "small/");
  await widget(page, { state: "at=9,4&order=-kept:contribution&measure=contribution", rerun: 1000 });
  await page.waitForFunction(() => document.querySelectorAll("#cell .thumb .kept-value:not([hidden])").length === 8);
  const { maps } = bench.served.atlas("small");
  const values = maps.flatMap((map) => [0, 1, 2, 3].map((head) => keptOfHead(map, head, [9], [4], "contribution"))).sort((a, b) => b - a);
  const shown = await page.locator("#cell .thumb .kept-value").allTextContents();
  shown.forEach((text, at) => assert.ok(Math.abs(Number(text.split(" ")[0]) - values[at]) < 6e-4, `${text}, ${values[at]}`));
  assert.equal(await page.locator("#cell .opener summary").textContent(), "Why no switching off");
  await page.locator("#cell .rerun textarea").fill("other");
  await page.locator("#cell .rerun textarea").press("Enter");
  await page.getByText("Compare with before").waitFor();
  await page.locator("#cell select[data-control=order]").selectOption("-kept:change");
  await page.waitForFunction(() => document.querySelector("#cell .count")?.textContent?.includes("less that of the text before"));
  quiet();
});

test("a pin is set from the grid, and the focus stays", async () => {
  const { page, quiet } = await open(bench, "small/");
  await page.locator("button.thumb").nth(3).focus();
  await page.keyboard.press("p");
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.head), "3");
  assert.equal(await page.locator(".pin").count(), 1);
  assert.equal(await hashOf(page), "#pins=0.3");
  quiet();
});

test("the page in a frame without an origin, as in a notebook", async () => {
  const { page, errors } = await open(bench, "cross/");
  const frames = await bench.browser.newPage();
  frames.on("pageerror", (error) => errors.push(String(error)));
  frames.on("console", (message) => errors.push(message.text()));
  const text = staticPage(bench.served.atlas("small"));
  await frames.goto("data:text/html,<!doctype html><title>notebook</title>");
  await frames.evaluate((text) => {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads allow-forms");
    Object.assign(frame, { srcdoc: text, width: "900", height: "640" });
    document.body.append(frame);
  }, text);
  const inside = frames.frameLocator("iframe");
  await inside.locator("button.thumb").nth(2).click();
  await inside.locator(".head-view").waitFor();
  await inside.locator(".plot").press("k");
  await inside.getByText("h.0 · head 3").first().waitFor();
  await inside.locator(".plot").press("g");
  await inside.getByLabel("index, token or phrase").fill("3, 2");
  await inside.getByLabel("index, token or phrase").press("Enter");
  await inside.locator("dialog").waitFor({ state: "detached" });
  await inside.getByText("query 3").first().waitFor();
  assert.deepEqual(errors, []);
  await page.close();
});
