import assert from "node:assert/strict";
import { after, before, test } from "node:test";
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

test("a notebook's messages", async () => {
  const { page, quiet } = await open(bench, "small/");
  const told = await page.evaluate(async () => {
    const module = (await import(new URL("explorer.js", location.href).href)) as Module;
    const source = new module.HttpSource(new URL("./", location.href).href);
    const asked: string[] = [];
    let answer: (message: unknown, buffers: DataView[]) => void = () => undefined;
    const model = {
      get: (name: string) => ({ state: "view=head&head=2&at=9,4" })[name],
      on: (_: string, listener: typeof answer) => {
        answer = listener;
      },
      send: async ({
        id,
        method,
        arguments: named,
      }: {
        id: number;
        method: string;
        arguments: Record<string, number>;
      }) => {
        asked.push(method);
        const { map, head, row0, row1, column0, column1, side, start, stop, level, reduce, which } = named;
        const args: Record<string, unknown[]> = {
          meta: [],
          tokens: [map, side, start, stop],
          pooled: [map, head, level, reduce],
          profile: [map, head, which],
          weights: [map, head, { row0, row1, column0, column1 }],
        };
        const result = await source[method](...args[method]);
        if (result instanceof Float32Array) answer({ id }, [new DataView(result.buffer)]);
        else answer({ id, result }, []);
      },
    };
    const el = document.createElement("div");
    document.body.append(el);
    const destroy = await module.default.render({ model, el });
    const ready = () => /0\.\d{4}$/.test(el.querySelector(".status")?.textContent ?? "");
    while (!ready()) await new Promise((resolve) => setTimeout(resolve, 30));
    const heading = el.querySelector("aside h2")?.textContent;
    destroy();
    return { heading, asked: [...new Set(asked)].sort(), left: el.querySelectorAll("canvas").length };
  });
  assert.deepEqual(told, {
    heading: "h.0 · head 2",
    asked: ["meta", "profile", "tokens", "weights"].concat(told.asked.includes("pooled") ? ["pooled"] : []).sort(),
    left: 0,
  });
  quiet();
});

test("another sentence, where the source can run the model", async () => {
  const { page, quiet } = await open(bench, "small/");
  assert.equal(await page.locator(".rerun").count(), 0);
  await page.evaluate(async () => {
    const module = (await import(new URL("explorer.js", location.href).href)) as Module;
    const source = new module.HttpSource(new URL("./", location.href).href);
    const first = (await source.meta()) as { title: string };
    source.meta = async () => first;
    source.rerun = async (text) => {
      first.title = String(text);
    };
    const root = document.getElementById("regard-explorer") as HTMLElement;
    await module.mount(root, source, "view=head&head=1&frame=4,4,9");
  });
  await page.locator(".rerun input").fill("It was <i>tired</i>.");
  await page.locator(".rerun button").click();
  await page.waitForFunction(() => document.querySelector("h1")?.textContent === "It was <i>tired</i>.");
  assert.equal(await page.locator(".head-view").count(), 1);
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
