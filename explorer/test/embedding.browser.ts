import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { type Bench, open, start } from "./harness.ts";
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
async function widget(page: Page, settings: { state: string; rerun: number }): Promise<void> {
  await page.evaluate(async ({ state, rerun }) => {
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
    const model = {
      get: (name: string) => ({ state, height: 800 })[name],
      on: (_: string, listener: typeof answer) => {
        answer = listener;
      },
      off: () => {
        answer = () => undefined;
      },
      send: async (message: { id: string; method: string; arguments: Record<string, never> }) => {
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
    document.body.replaceChildren(el);
    Object.assign(window, { asked, destroy: await module.default.render({ model, el }) });
  }, settings);
}

test("a notebook's messages", async () => {
  const { page, quiet } = await open(bench, "small/");
  await widget(page, { state: "view=head&head=2&at=9,4", rerun: 0 });
  await page.waitForFunction(() => /0\.\d{4}$/.test(document.querySelector("#cell .status")?.textContent ?? ""));
  assert.equal(await page.locator("#cell aside h2").textContent(), "h.0 · head 2");
  assert.equal(await page.locator("#cell .shelf").isVisible(), false);
  assert.equal((await page.locator("#cell .regard-explorer").boundingBox())?.height, 800);
  await page.waitForFunction(() => {
    const { asked } = window as unknown as { asked: string[] };
    return ["atlases", "meta", "profile", "tokens", "weights"].every((method) => asked.includes(method));
  });
  await page.evaluate(() => (window as unknown as { destroy: () => void }).destroy());
  assert.equal(await page.locator("#cell canvas").count(), 0);
  quiet();
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

test("a pin is set from the grid, and the focus stays", async () => {
  const { page, quiet } = await open(bench, "small/");
  await page.locator("button.thumb").nth(3).focus();
  await page.keyboard.press("p");
  assert.equal(await page.evaluate(() => (document.activeElement as HTMLElement).dataset.head), "3");
  assert.equal(await page.locator(".pin").count(), 1);
  assert.equal(new URL(page.url()).hash, "#pins=0.3");
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
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    Object.assign(frame, { srcdoc: text, width: "900", height: "640" });
    document.body.append(frame);
  }, text);
  const inside = frames.frameLocator("iframe");
  await inside.locator("button.thumb").nth(2).click();
  await inside.locator(".head-view").waitFor();
  await inside.locator(".plot").press("ArrowRight");
  await inside.getByText("h.0 · head 3").first().waitFor();
  assert.deepEqual(errors, []);
  await page.close();
});
