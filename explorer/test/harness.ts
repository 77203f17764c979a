/** A page over synthetic attention in Debian's Chromium, watched for errors and for requests that leave. */

import assert from "node:assert/strict";
import type { Browser, Page } from "playwright-core";
import type { Loader } from "../src/loader.ts";
import type { Shape } from "../src/shapes.ts";
import { launch } from "./chromium.ts";
import { type Served, serve } from "./server.ts";

export const WEB = process.env.REGARD_WEB ?? "../src/regard/explorer/web";

export interface Bench {
  browser: Browser;
  served: Served;
  close(): Promise<void>;
}

/** `gpu`: with a GPU in software, which makes everything slow. */
export async function start(delay = 0, gpu = false): Promise<Bench> {
  const served = await serve(WEB, 0, delay);
  const browser = await launch(...(gpu ? ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"] : []));
  const close = async () => {
    await browser.close();
    await new Promise((resolve) => served.server.close(resolve));
  };
  return { browser, served, close };
}

export interface Watched {
  page: Page;
  errors: string[];
  requests: string[];
  /** Fails if the page said anything on its console, threw, or asked anyone but its own server. */
  quiet(): void;
}

export interface Look {
  renderer?: string;
  scheme?: "light" | "dark";
  motion?: "reduce" | "no-preference";
  /** A screen that is touched. */
  touch?: boolean;
  size?: { width: number; height: number };
}

export async function open(bench: Bench, path: string, look: Look = {}): Promise<Watched> {
  const page = await bench.browser.newPage({
    viewport: look.size ?? { width: 1280, height: 800 },
    hasTouch: look.touch ?? false,
    colorScheme: look.scheme ?? "light",
    reducedMotion: look.motion ?? "reduce",
    acceptDownloads: true,
  });
  const errors: string[] = [];
  const requests: string[] = [];
  page.on("console", (message) => errors.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("request", (request) => requests.push(request.url()));
  const [where, hash = ""] = path.split("#");
  const address = where.includes("://")
    ? where
    : `${bench.served.address}/${where}?renderer=${look.renderer ?? "canvas"}`;
  await page.goto(hash ? `${address}#${hash}` : address);
  await page.waitForSelector(".regard-explorer main > div");
  const origin = where.includes("://") ? where : bench.served.address;
  const quiet = () => {
    assert.deepEqual(errors, []);
    for (const request of requests) assert.ok(request.startsWith(origin) || /^(data|blob):/.test(request), request);
  };
  return { page, errors, requests, quiet };
}

/** Waits until nothing is asked for any more, and the last frame is drawn. */
export async function settled(page: Page): Promise<void> {
  const idle = () => (document.getElementById("regard-explorer") as unknown as Root).explorer.loading.busy === 0;
  for (let calm = 0; calm < 3; ) {
    await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
    calm = (await page.evaluate(idle)) ? calm + 1 : 0;
  }
}

/** The element that the page's explorer hangs on, for looking inside. */
export interface Root {
  explorer: {
    loading: Loader;
    view: { picture(): { shapes: { image: HTMLCanvasElement }[] }; panel: { painter: { name: string } } };
  };
}

/** All that is drawn of a view, without its groups. */
export async function shapesOf(page: Page): Promise<Shape[]> {
  const text = await page.evaluate(() => {
    const { shapes } = (document.getElementById("regard-explorer") as unknown as Root).explorer.view.picture();
    return JSON.stringify(shapes);
  });
  const flat = (shapes: Shape[]): Shape[] =>
    shapes.flatMap((shape) => (shape.kind === "group" ? flat(shape.shapes) : [shape]));
  return flat(JSON.parse(text) as Shape[]);
}

/** The pixels of the plot, whatever has drawn it. */
export async function plotPixels(page: Page): Promise<{ width: number; height: number; data: Buffer }> {
  const { width, height, text } = await page.evaluate(() => {
    const root = document.getElementById("regard-explorer") as unknown as Root;
    const { image } = root.explorer.view.picture().shapes[0];
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [image.width, image.height];
    const context = copy.getContext("2d") as CanvasRenderingContext2D;
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(0, 0, copy.width, copy.height);
    let bytes = "";
    for (let i = 0; i < data.length; i += 8192) bytes += String.fromCharCode(...data.subarray(i, i + 8192));
    return { width: copy.width, height: copy.height, text: btoa(bytes) };
  });
  return { width, height, data: Buffer.from(text, "base64") };
}

/** Asked of the page: what the driver knows of its address comes later. */
export function hashOf(page: Page): Promise<string> {
  return page.evaluate(() => location.hash);
}

export async function plotBox(page: Page): Promise<{ x: number; y: number; width: number; height: number }> {
  const box = await page.locator(".plot").first().boundingBox();
  assert.ok(box);
  return box;
}
