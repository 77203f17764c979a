import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { type Bench, open, settled, shapesOf, start } from "./harness.ts";

let bench: Bench;
before(async () => {
  bench = await start();
});
after(() => bench.close());

interface Box {
  what: string;
  left: number;
  top: number;
  right: number;
  bottom: number;
}

const SIZES = [
  { width: 1280, height: 800 },
  { width: 400, height: 800 },
];

for (const size of SIZES) {
  for (const view of ["grid", "head", "lines", "text", "compare", "table"]) {
    test(`nothing is cut off or covered: ${view}, ${size.width} × ${size.height}`, async () => {
      const { page, quiet } = await open(bench, `cross/#view=${view}&pins=0.0,0.1&at=3,2`);
      await page.setViewportSize(size);
      await settled(page);
      const boxes = await page.evaluate(() =>
        [...document.querySelectorAll<HTMLElement>(".top :is(button, select, input), .bar :is(button, select, input)")]
          .filter((node) => node.offsetParent !== null)
          .map((node): Box => {
            const { left, top, right, bottom } = node.getBoundingClientRect();
            return { what: node.outerHTML.slice(0, 80), left, top, right, bottom };
          }),
      );
      assert.ok(boxes.length > 10);
      boxes.forEach((box, at) => {
        assert.ok(box.left >= 0 && box.right <= size.width, `${box.what} ends at ${box.right}`);
        for (const other of boxes.slice(at + 1)) {
          const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
          const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
          // Buttons of a group share their border.
          assert.ok(across <= 1.5 || down <= 1.5, `${box.what} and ${other.what} overlap`);
        }
      });
      const main = await page.locator("main").boundingBox();
      assert.ok(main && main.height > 300 && main.width === size.width);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
      for (const plot of await page.locator(".plot").all()) {
        const box = await plot.boundingBox();
        assert.ok(box && box.width > 200 && box.height > 200, `a plot of ${box?.width} × ${box?.height}`);
        assert.ok(box.x > 0 && box.x + box.width <= size.width, `a plot from ${box.x} on, ${box.width} wide`);
      }
      quiet();
    });
  }
}

test("what is known of a head lies beside its map, or below it where the page is narrow", async () => {
  const { page, quiet } = await open(bench, "cross/#view=head");
  const boxes = async () => {
    await settled(page);
    const [plot, aside] = [await page.locator(".plot").boundingBox(), await page.locator("aside").boundingBox()];
    assert.ok(plot && aside);
    return { plot, aside };
  };
  const wide = await boxes();
  assert.ok(wide.aside.x > wide.plot.x + wide.plot.width);
  await page.setViewportSize({ width: 400, height: 800 });
  const narrow = await boxes();
  assert.ok(narrow.aside.y > narrow.plot.y + narrow.plot.height);
  assert.ok(narrow.aside.width > 380);
  quiet();
});

test("compared heads have their whole names where what is said of them does not fit", async () => {
  const { page, quiet } = await open(bench, "cross/#view=compare&pins=0.0,0.1,0.2");
  await page.setViewportSize({ width: 900, height: 600 });
  await settled(page);
  const cut = (selector: string) =>
    page.locator(selector).evaluateAll((nodes) => nodes.map((node) => node.scrollWidth > node.clientWidth + 1));
  assert.deepEqual(await cut(".pane h2"), [false, false, false]);
  assert.ok((await cut(".pane header .muted")).includes(true));
  quiet();
});

test("the scale of the colours is told by each legend, as a sign where there is no room for words", async () => {
  for (const [width, said] of [
    [1280, /^≥ \S+ {2}·  square root$/],
    [760, /^≥ \S+ {2}√$/],
  ] as const) {
    const { page, quiet } = await open(bench, "cross/#view=compare&pins=0.0,0.1,0.2");
    await page.setViewportSize({ width, height: 600 });
    await settled(page);
    const texts = (await shapesOf(page)).flatMap((shape) => (shape.kind === "text" ? [shape.text] : []));
    assert.equal(texts.filter((text) => said.test(text)).length, 3, `${width}: ${texts.join(" | ")}`);
    quiet();
  }
});
