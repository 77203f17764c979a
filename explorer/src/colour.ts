/** Colours of weights: tables, scales, and the painting of arrays without a GPU. */

import { CIVIDIS, MAGMA, VIRIDIS } from "./tables.ts";

export type ColourMap = "viridis" | "cividis" | "magma";
export type Scale = "linear" | "sqrt" | "log";

export const COLOUR_MAPS: readonly ColourMap[] = ["viridis", "cividis", "magma"];
export const SCALES: readonly Scale[] = ["linear", "sqrt", "log"];

/** How values become colours; `signed` values run from -maximum to maximum in the diverging map. */
export interface Colouring {
  colours: ColourMap;
  scale: Scale;
  maximum: number;
  signed: boolean;
}

/** The logarithmic scale shows so many powers of ten below the maximum. */
export const DECADES = 4;

/** Where a size lies between none and the maximum: 0 to 1. */
export function position(size: number, maximum: number, scale: Scale): number {
  const part = maximum > 0 ? Math.min(size / maximum, 1) : 0;
  if (scale === "sqrt") return Math.sqrt(part);
  if (scale === "log") return part <= 10 ** -DECADES ? 0 : 1 + Math.log10(part) / DECADES;
  return part;
}

/** The entry of the table for a value: 0 to 255. */
export function entry(value: number, colouring: Colouring): number {
  const at = position(Math.abs(value), colouring.maximum, colouring.scale);
  if (!colouring.signed) return Math.floor(at * 255 + 0.5);
  return Math.floor(127.5 + (value < 0 ? -at : at) * 127.5 + 0.5);
}

const tables = new Map<string, Uint8Array>();

/** 256 entries of red, green, blue, alpha. */
export function table(colours: ColourMap, signed: boolean): Uint8Array {
  const name = signed ? "diverging" : colours;
  let found = tables.get(name);
  if (!found) {
    found = signed ? diverging() : decoded({ viridis: VIRIDIS, cividis: CIVIDIS, magma: MAGMA }[colours]);
    tables.set(name, found);
  }
  return found;
}

function decoded(text: string): Uint8Array {
  const bytes = atob(text);
  const rgba = new Uint8Array(1024).fill(255);
  for (let i = 0; i < 256; i += 1) {
    for (let channel = 0; channel < 3; channel += 1) rgba[4 * i + channel] = bytes.charCodeAt(3 * i + channel);
  }
  return rgba;
}

// Blue for less, orange for more, almost white for equal: in Oklab (Ottosson 2020), told apart by all common forms of
// colour blindness, with lightness falling evenly on both sides.
const LESS: Oklab = [0.4, -0.03, -0.145];
const EQUAL: Oklab = [0.97, 0, 0];
const MORE: Oklab = [0.47, 0.105, 0.095];

type Oklab = [number, number, number];

function diverging(): Uint8Array {
  const rgba = new Uint8Array(1024).fill(255);
  for (let i = 0; i < 256; i += 1) {
    const away = Math.abs(i - 127.5) / 127.5;
    const end = i < 127.5 ? LESS : MORE;
    const mixed = EQUAL.map((value, k) => value + (end[k] - value) * away) as Oklab;
    rgba.set(rgb(mixed), 4 * i);
  }
  return rgba;
}

function rgb([lightness, a, b]: Oklab): [number, number, number] {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => {
    const held = Math.min(Math.max(value, 0), 1);
    return Math.round(255 * (held <= 0.0031308 ? 12.92 * held : 1.055 * held ** (1 / 2.4) - 0.055));
  }) as [number, number, number];
}

/** What `paint` gives for a weight that is not a number: transparent, so that it is no colour of a weight. */
export const BROKEN_PIXEL = 1;

/** The pixels of `data`; 0 where a pair does not exist, `broken` where a weight is not a number. */
export function paint(
  data: Float32Array,
  colouring: Colouring,
  broken = BROKEN_PIXEL,
): Uint8ClampedArray<ArrayBuffer> {
  const pixels = new Uint32Array(data.length);
  const entries = new Uint32Array(table(colouring.colours, colouring.signed).buffer);
  // `entry` written out: this runs for a million cells at a time.
  const { maximum, signed, scale } = colouring;
  const [root, logarithm] = [scale === "sqrt", scale === "log"];
  for (let i = 0; i < data.length; i += 1) {
    const value = data[i];
    if (value !== value) continue;
    if (value === Infinity || value === -Infinity) {
      pixels[i] = broken;
      continue;
    }
    let at = maximum > 0 ? Math.min(Math.abs(value) / maximum, 1) : 0;
    if (root) at = Math.sqrt(at);
    else if (logarithm) at = at <= 10 ** -DECADES ? 0 : 1 + Math.log10(at) / DECADES;
    const index = signed ? 127.5 + (value < 0 ? -at : at) * 127.5 : at * 255;
    pixels[i] = entries[Math.floor(index + 0.5)];
  }
  return new Uint8ClampedArray(pixels.buffer);
}

/** Names a colouring, for caches of what was painted with it. */
export function colouringName(colouring: Colouring): string {
  return `${colouring.signed ? "diverging" : colouring.colours} ${colouring.scale} ${colouring.maximum}`;
}
