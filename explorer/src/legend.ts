/** The colour bar with its numbers. */

import { FORMULA } from "./contributions.ts";
import { DECADES, table } from "./colour.ts";
import type { Palette } from "./palette.ts";
import { type Shape, textWidth } from "./shapes.ts";
import type { State } from "./state.ts";
import { figure } from "./text.ts";

const WIDTH = 140;
const LEAST_WIDTH = 40;

const SIZE = 11;

const HEIGHT = 8;

/** A scale in words and, where these have no room, as a sign. */
const SCALE_WORDS = { linear: ["linear", ""], sqrt: ["square root", "  √"], log: ["logarithmic", "  log"] } as const;

const bars = new Map<string, HTMLCanvasElement>();

export interface Legend {
  maximum: number | undefined;
  /** What the last colour stands for, in words; the maximum where absent. */
  most?: string;
  signed: boolean;
  /** By what rows are divided, in words. */
  divisor: string;
  /** Whether colours stand for means of cells. */
  mean: boolean;
  /** Whether some queries attend to NaN. */
  broken: boolean;
  /** How many pixels there are. */
  room: number;
}

export function legendShapes(legend: Legend, state: State, palette: Palette): Shape[] {
  const { maximum, signed, divisor, mean, broken, room } = legend;
  const unit = state.normalise ? ` × ${divisor}` : "";
  const beyond = state.clip && !state.normalise ? "≥ " : "";
  const most = legend.most ?? (maximum === undefined ? "…" : beyond + figure(maximum) + unit);
  const least = signed
    ? `${beyond ? "≤ " : ""}−${figure(maximum)}${unit}`
    : state.scale === "log" && maximum !== undefined
      ? `≤ ${figure(maximum / 10 ** DECADES)}`
      : "0";
  const style = { kind: "text", y: HEIGHT / 2, colour: palette.muted, size: SIZE } as const;
  const wide = (text: string) => textWidth(text, style);
  const shapes: Shape[] = [{ ...style, x: 0, text: least }];
  const start = 8 + wide(least);
  const [scale, sign] = SCALE_WORDS[state.scale];
  const long = `${most}  ·  ${scale}${state.measure === "contribution" ? `  ·  ${FORMULA}` : ""}`;
  const words = start + LEAST_WIDTH + 8 + wide(long) <= room ? long : most + sign;
  const width = Math.max(Math.min(WIDTH, room - start - 8 - wide(words)), LEAST_WIDTH);
  shapes.push({ kind: "image", image: bar(state.colours, signed), x: start, y: 0, width, height: HEIGHT });
  shapes.push({ ...style, x: start + width + 8, text: words });
  let next = start + width + 8 + wide(words) + 14;
  if (broken && next + 18 + wide("NaN") <= room) {
    shapes.push(...checkShapes(next, palette), { ...style, x: next + 18, text: "NaN" });
    next += 18 + wide("NaN") + 14;
  }
  // A mean is over all pairs of its cell.
  const absent = [mean ? "no pair, 0 in a mean" : "", "no pair"].find(
    (text) => text && next + 18 + wide(text) <= room,
  );
  if (!absent) return shapes;
  shapes.push(...hatchShapes(next, palette), { ...style, x: next + 18, text: absent });
  return shapes;
}

/** The sign for "no pair", at y = -1 to 9. */
export function hatchShapes(x: number, palette: Palette): Shape[] {
  return [
    { kind: "box", x, y: -1, width: 12, height: 10, fill: palette.hatchPaper, stroke: palette.line },
    { kind: "path", stroke: palette.hatchLine, width: 1, points: [x + 1, 8, x + 11, 0] },
  ];
}

/** The sign for "NaN". */
export function checkShapes(x: number, palette: Palette): Shape[] {
  const fill = palette.broken;
  return [
    { kind: "box", x, y: -1, width: 12, height: 10, fill: palette.brokenPaper, stroke: palette.line },
    { kind: "box", x, y: -1, width: 6, height: 5, fill },
    { kind: "box", x: x + 6, y: 4, width: 6, height: 5, fill },
  ];
}

function bar(colours: State["colours"], signed: boolean): HTMLCanvasElement {
  const name = signed ? "diverging" : colours;
  let canvas = bars.get(name);
  if (!canvas) {
    canvas = document.createElement("canvas");
    canvas.width = 256;
    canvas.height = 1;
    const context = canvas.getContext("2d") as CanvasRenderingContext2D;
    context.putImageData(new ImageData(new Uint8ClampedArray(table(colours, signed)), 256, 1), 0, 0);
    bars.set(name, canvas);
  }
  return canvas;
}
