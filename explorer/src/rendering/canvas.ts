/** Rasters drawn pixel by pixel into the 2D canvas, by the same formula as the GPU's. */

import { BROKEN_PIXEL, type Colouring, colouringName, paint } from "../colour.ts";
import type { Raster } from "../raster.ts";
import type { Size } from "../types.ts";
import { Bounded, CHECK_SIDE, cut, type Hatch, HATCH_PERIOD, type Painter, type Quad, resize } from "./painter.ts";

const PAINTED_BYTES = 32e6;

export class CanvasPainter implements Painter {
  readonly name = "canvas";
  readonly canvas = document.createElement("canvas");
  private readonly context = this.canvas.getContext("2d") as CanvasRenderingContext2D;
  private readonly painted = new Bounded<Uint32Array>(PAINTED_BYTES, () => undefined);
  private image?: ImageData;

  draw(size: Size, quads: Quad[], colouring: Omit<Colouring, "maximum">, hatch: Hatch): void {
    resize(this.canvas, size);
    if (this.image?.width !== size.width || this.image.height !== size.height) {
      this.image = new ImageData(size.width, size.height);
    }
    const pixels = new Uint32Array(this.image.data.buffer);
    pixels.fill(0);
    const colours = {
      paper: pixelOf(hatch.paper),
      line: pixelOf(hatch.line),
      broken: pixelOf(hatch.broken),
      brokenPaper: pixelOf(hatch.brokenPaper),
    };
    for (const whole of quads) {
      const quad = cut(whole, size);
      if (!quad) continue;
      const own = { ...colouring, maximum: quad.maximum };
      const { raster } = quad;
      const entries = this.painted.get(`${raster.id} ${colouringName(own)}`, raster.data.byteLength, () => {
        return new Uint32Array(paint(raster.data, own).buffer);
      });
      sample(quad, entries, pixels, size.width, colours);
    }
    this.context.putImageData(this.image, 0, 0);
  }

  destroy(): void {
    this.painted.clear();
    this.image = undefined;
    this.canvas.width = 0;
  }
}

/** Each pixel of the target takes the cell under its centre: hatched where it has no pair, checked where it is NaN. */
function sample(
  { raster, source, target }: Quad,
  entries: Uint32Array,
  pixels: Uint32Array,
  width: number,
  { paper, line, broken, brokenPaper }: Record<keyof Hatch, number>,
): void {
  const columns = cellsUnder(source.x, source.width, target.width, raster.columns);
  const rows = cellsUnder(source.y, source.height, target.height, raster.rows);
  for (let y = 0; y < target.height; y += 1) {
    const from = rows[y] * raster.columns;
    const to = (target.y + y) * width + target.x;
    for (let x = 0; x < target.width; x += 1) {
      const entry = entries[from + columns[x]];
      if (entry === 0) {
        const dashed = (target.x + x + target.y + y) % HATCH_PERIOD === HATCH_PERIOD - 1;
        pixels[to + x] = dashed ? line : paper;
      } else if (entry === BROKEN_PIXEL) {
        const checks = Math.floor((target.x + x) / CHECK_SIDE) + Math.floor((target.y + y) / CHECK_SIDE);
        pixels[to + x] = checks % 2 ? brokenPaper : broken;
      } else pixels[to + x] = entry;
    }
  }
}

function cellsUnder(start: number, cells: number, pixels: number, count: number): Int32Array {
  return Int32Array.from({ length: pixels }, (_, pixel) => {
    return Math.min(Math.max(Math.floor(start + ((pixel + 0.5) / pixels) * cells), 0), count - 1);
  });
}

/** "#rrggbb" as a pixel of image data, which has its bytes in the order red, green, blue, alpha. */
function pixelOf(colour: string): number {
  const value = Number.parseInt(colour.slice(1), 16);
  return new Uint32Array(Uint8Array.of(value >> 16, value >> 8, value, 255).buffer)[0];
}

/** One pixel for each cell; clear where a pair does not exist, the colour `broken` where a weight is not a number. */
export function paintInto(image: HTMLCanvasElement, raster: Raster, colouring: Colouring, broken: string): void {
  image.width = raster.columns;
  image.height = raster.rows;
  const context = image.getContext("2d") as CanvasRenderingContext2D;
  context.putImageData(new ImageData(paint(raster.data, colouring, pixelOf(broken)), raster.columns, raster.rows), 0, 0);
}
