/** What draws rasters: a GPU, or the 2D canvas where there is none. Both give the same picture. */

import type { Colouring } from "../colour.ts";
import type { Raster } from "../raster.ts";
import type { Size } from "../types.ts";

/** Device pixels of the plot. */
export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** A part of a raster (in its cells) and where it goes (in whole device pixels). */
export interface Quad {
  raster: Raster;
  source: Box;
  target: Box;
  maximum: number;
}

/** Colours of the hatch that stands for pairs that do not exist, and of the checks that stand for NaN. */
export interface Hatch {
  paper: string;
  line: string;
  broken: string;
  brokenPaper: string;
}

export interface Painter {
  readonly name: "webgl" | "canvas";
  readonly canvas: HTMLCanvasElement;
  draw(size: Size, quads: Quad[], colouring: Omit<Colouring, "maximum">, hatch: Hatch): void;
  destroy(): void;
}

/** The hatch is a line of one pixel every so many pixels, rising to the right. */
export const HATCH_PERIOD = 8;

/** The checks are squares of so many pixels. */
export const CHECK_SIDE = 4;

/** The quad cut to the plot, so that a tile much larger than the screen costs no more than the screen. */
export function cut(quad: Quad, size: Size): Quad | undefined {
  const { source, target } = quad;
  const left = Math.max(target.x, 0);
  const top = Math.max(target.y, 0);
  const right = Math.min(target.x + target.width, size.width);
  const bottom = Math.min(target.y + target.height, size.height);
  if (right <= left || bottom <= top) return undefined;
  const across = source.width / target.width;
  const down = source.height / target.height;
  return {
    ...quad,
    source: {
      x: source.x + (left - target.x) * across,
      y: source.y + (top - target.y) * down,
      width: (right - left) * across,
      height: (bottom - top) * down,
    },
    target: { x: left, y: top, width: right - left, height: bottom - top },
  };
}

/** Sets the size of a canvas only where it differs, since setting it clears. */
export function resize(canvas: HTMLCanvasElement, size: Size): void {
  if (canvas.width !== size.width) canvas.width = size.width;
  if (canvas.height !== size.height) canvas.height = size.height;
}

/** Things with a price, the least recently used thrown away beyond a bound. */
export class Bounded<T> {
  private readonly kept = new Map<string, { value: T; price: number }>();
  private total = 0;

  constructor(
    private readonly limit: number,
    private readonly discard: (value: T) => void,
  ) {}

  get(key: string, price: number, make: () => T): T {
    const found = this.kept.get(key) ?? { value: make(), price };
    if (!this.kept.delete(key)) this.total += price;
    this.kept.set(key, found);
    for (const [old, { value, price: freed }] of this.kept) {
      if (this.total <= this.limit || old === key) break;
      this.kept.delete(old);
      this.total -= freed;
      this.discard(value);
    }
    return found.value;
  }

  clear(): void {
    for (const { value } of this.kept.values()) this.discard(value);
    this.kept.clear();
    this.total = 0;
  }
}
