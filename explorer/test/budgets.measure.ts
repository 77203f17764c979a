/** What the budgets come to on this machine: first paint, frames per second, heap. Prints; judges nothing. */

import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { type Bench, open, type Root, settled, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

interface Pannable {
  explorer: { update(patch: { frame: { row: number; column: number; span: number } }): void };
}

test("first paint of 12 × 12 heads of 512 tokens", async () => {
  // The server of these tests computes its levels once; what is measured is the page.
  const warm = await open(bench, "short/");
  await warm.page.setViewportSize({ width: 1280, height: 1500 });
  await settled(warm.page);
  await warm.page.close();
  for (let round = 0; round < 3; round += 1) {
    const page = await bench.browser.newPage({ viewport: { width: 1280, height: 1500 } });
    await page.addInitScript(() => {
      const look = () => {
        const drawn = document.querySelectorAll("canvas.drawn").length;
        const times = ((window as unknown as { times: Record<number, number> }).times ??= {});
        for (const count of [1, 144]) if (drawn >= count) times[count] ??= performance.now();
        requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
    });
    await page.goto(`${bench.served.address}/short/?renderer=canvas`);
    await page.waitForFunction(() => document.querySelectorAll("canvas.drawn").length === 144);
    await page.waitForTimeout(50);
    const times = await page.evaluate(() => (window as unknown as { times: Record<number, number> }).times);
    console.log(
      `first paint, round ${round}: first head ${times[1].toFixed(0)} ms, all 144 ${times[144].toFixed(0)} ms`,
    );
    await page.close();
  }
});

const file = process.env.REGARD_PAGE;
test("first paint of the page of one file that REGARD_PAGE names", { skip: file ? false : "none is named" }, async () => {
  for (let round = 0; round < 5; round += 1) {
    const page = await bench.browser.newPage({ viewport: { width: 1366, height: 768 } });
    await page.addInitScript(() => {
      const look = () => {
        const drawn = document.querySelector("canvas.drawn") ?? document.querySelector(".plot canvas");
        if (drawn) (window as unknown as { painted: number }).painted = performance.now();
        else requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
    });
    await page.goto(pathToFileURL(file ?? "").href);
    const painted = await (await page.waitForFunction(() => (window as unknown as { painted?: number }).painted)).jsonValue();
    console.log(`first paint of one file, round ${round}: ${painted?.toFixed(0)} ms`);
    await page.close();
  }
});

for (const renderer of ["canvas", "webgl"]) {
  for (const [name, span, step] of [
    ["pooled", 30_000, 60],
    ["exact", 700, 2],
  ] as const) {
    test(`panning at 100,000 tokens, ${renderer}, ${name}`, async () => {
      const bench = await start(0, renderer === "webgl");
      const { page } = await open(bench, `long/#view=head&frame=60000,55000,${span}`, {
        renderer,
        motion: "no-preference",
      });
      await settled(page);
      const spent = async () => {
        const { processInfo } = await client.send("SystemInfo.getProcessInfo");
        return processInfo.reduce((sum, info) => sum + info.cpuTime, 0);
      };
      const client = await bench.browser.newBrowserCDPSession();
      const before = await spent();
      const frames = await page.evaluate(
        ({ span, step }) =>
          new Promise<{ gaps: number[]; work: number[] }>((resolve) => {
            const { explorer } = document.getElementById("regard-explorer") as unknown as Pannable;
            const gaps: number[] = [];
            const work: number[] = [];
            let last = performance.now();
            let at = 0;
            const turn = () => {
              const now = performance.now();
              gaps.push(now - last);
              last = now;
              at += 1;
              explorer.update({ frame: { row: 60_000 + at * step, column: 55_000 + at * step, span } });
              requestAnimationFrame(() => work.push(performance.now() - now));
              if (at < 150) requestAnimationFrame(turn);
              else resolve({ gaps: gaps.slice(2), work });
            };
            requestAnimationFrame(turn);
          }),
        { span, step },
      );
      const each = ((await spent()) - before) / frames.gaps.length;
      const middle = (list: number[], part: number) => [...list].sort((a, b) => a - b)[Math.floor(list.length * part)];
      const mean = frames.gaps.reduce((sum, gap) => sum + gap, 0) / frames.gaps.length;
      const memory = await page.evaluate(
        () => (performance as unknown as { memory: { usedJSHeapSize: number } }).memory.usedJSHeapSize,
      );
      const held = await page.evaluate(
        () => (document.getElementById("regard-explorer") as unknown as Root).explorer.loading.held,
      );
      const rate = `${(1000 / mean).toFixed(0)} frames/s`;
      const gaps = `median ${middle(frames.gaps, 0.5).toFixed(1)} ms, 95th ${middle(frames.gaps, 0.95).toFixed(1)} ms`;
      const work = `processor time of all of Chromium ${(1000 * each).toFixed(1)} ms a frame`;
      const sizes = `heap ${(memory / 1e6).toFixed(0)} MB, held ${(held / 1e6).toFixed(0)} MB`;
      console.log(`panning, ${renderer}, ${name}: ${rate} (${gaps}), ${work}, ${sizes}`);
      await bench.close();
    });
  }
}

test("heap after wandering through 100,000 tokens", async () => {
  const { page } = await open(bench, "long/#view=head");
  for (let place = 0; place < 14; place += 1) {
    await page.evaluate((place) => {
      const { explorer } = document.getElementById("regard-explorer") as unknown as Pannable;
      explorer.update({ frame: { row: 20_000 + place * 5000, column: 18_000 + place * 5000, span: 1100 } });
    }, place);
    await settled(page);
  }
  const client = await page.context().newCDPSession(page);
  await client.send("Performance.enable");
  await client.send("HeapProfiler.collectGarbage");
  const { metrics } = await client.send("Performance.getMetrics");
  const heap = metrics.find(({ name }) => name === "JSHeapUsedSize")?.value ?? 0;
  const { arrays, held } = await page.evaluate(() => ({
    arrays: (performance as unknown as { memory: { totalJSHeapSize: number } }).memory.totalJSHeapSize,
    held: (document.getElementById("regard-explorer") as unknown as Root).explorer.loading.held,
  }));
  const { processInfo } = await (await bench.browser.newBrowserCDPSession()).send("SystemInfo.getProcessInfo");
  for (const { type, id } of processInfo.filter(({ type }) => type === "renderer")) {
    const anonymous = /RssAnon:\s+(\d+)/.exec(readFileSync(`/proc/${id}/status`, "utf8"))?.[1];
    console.log(`after 14 places: ${type} process ${(Number(anonymous) / 1e3).toFixed(0)} MB of its own memory`);
  }
  const sizes = [heap, arrays, held].map((size) => `${(size / 1e6).toFixed(0)} MB`);
  console.log(`after 14 places of exact tiles: heap ${sizes[0]} of ${sizes[1]}, held by the loader ${sizes[2]}`);
});
