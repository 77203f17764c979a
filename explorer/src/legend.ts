/** The colour bar with its numbers. */

import { DECADES, table } from "./colour.ts";
import type { Palette } from "./palette.ts";
import type { Shape } from "./shapes.ts";
import type { State } from "./state.ts";
import { figure } from "./text.ts";

const WIDTH = 140;
const LEAST_WIDTH = 40;

/** About as wide as a character is. */
const CHARACTER = 6.8;

const HEIGHT = 8;

const bars = new Map<string, HTMLCanvasElement>();

export interface Legend {
  maximum: number | undefined;
  signed: boolean;
  /** By what rows are divided, in words. */
  divisor: string;
  /** Whether colours stand for means of cells. */
  mean: boolean;
  /** How many pixels there are. */
  room: number;
}

export function legendShapes({ maximum, signed, divisor, mean, room }: Legend, state: State, palette: Palette): Shape[] {
  const unit = state.normalise ? ` × ${divisor}` : "";
  const beyond = state.clip && !state.normalise ? "≥ " : "";
  const most = maximum === undefined ? "…" : beyond + figure(maximum) + unit;
  const least = signed
    ? `${beyond ? "≤ " : ""}−${figure(maximum)}${unit}`
    : state.scale === "log"
      ? `≤ ${figure((maximum ?? 0) / 10 ** DECADES)}`
      : "0";
  const shapes: Shape[] = [{ kind: "text", x: 0, y: HEIGHT / 2, text: least, colour: palette.muted, size: 11 }];
  // Room for the number before the bar, by its count of characters.
  const start = 8 + CHARACTER * least.length;
  const scale = state.scale === "linear" ? "linear" : state.scale === "sqrt" ? "square root" : "logarithmic";
  // The scale stands among the controls, too; the number stands here alone.
  const both = `${most}  ·  ${scale}`;
  const words = start + LEAST_WIDTH + 8 + CHARACTER * both.length <= room ? both : most;
  const width = Math.max(Math.min(WIDTH, room - start - 8 - CHARACTER * words.length), LEAST_WIDTH);
  shapes.push({ kind: "image", image: bar(state.colours, signed), x: start, y: 0, width, height: HEIGHT });
  shapes.push({ kind: "text", x: start + width + 8, y: HEIGHT / 2, text: words, colour: palette.muted, size: 11 });
  const next = start + width + 8 + CHARACTER * words.length + 14;
  // A mean is over all pairs of its cell.
  const absent = [mean ? "no pair, 0 in a mean" : "", "no pair"].find(
    (text) => text && next + 18 + CHARACTER * text.length <= room,
  );
  if (!absent) return shapes;
  shapes.push({ kind: "box", x: next, y: -1, width: 12, height: 10, fill: palette.hatchPaper, stroke: palette.line });
  shapes.push({
    kind: "path",
    stroke: palette.hatchLine,
    width: 1,
    points: [next + 1, 8, next + 11, 0],
  });
  shapes.push({ kind: "text", x: next + 18, y: HEIGHT / 2, text: absent, colour: palette.muted, size: 11 });
  return shapes;
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
