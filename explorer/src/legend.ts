/** The colour bar with its numbers. */

import { DECADES, table } from "./colour.ts";
import type { Palette } from "./palette.ts";
import type { Shape } from "./shapes.ts";
import type { State } from "./state.ts";
import { figure } from "./text.ts";

const WIDTH = 140;
const HEIGHT = 8;

const bars = new Map<string, HTMLCanvasElement>();

export interface Legend {
  maximum: number | undefined;
  signed: boolean;
  /** By what rows are divided, in words. */
  divisor: string;
  /** How many pixels there are. */
  room: number;
}

export function legendShapes({ maximum, signed, divisor, room }: Legend, state: State, palette: Palette): Shape[] {
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
  const start = 8 + 6.4 * least.length;
  shapes.push({ kind: "image", image: bar(state.colours, signed), x: start, y: 0, width: WIDTH, height: HEIGHT });
  const scale = state.scale === "linear" ? "linear" : state.scale === "sqrt" ? "square root" : "logarithmic";
  shapes.push({
    kind: "text",
    x: start + WIDTH + 8,
    y: HEIGHT / 2,
    text: `${most}  ·  ${scale}`,
    colour: palette.muted,
    size: 11,
  });
  const next = start + WIDTH + 70 + 6.4 * most.length + 30;
  if (room < next + 70) return shapes;
  shapes.push({ kind: "box", x: next, y: -1, width: 12, height: 10, fill: palette.hatchPaper, stroke: palette.line });
  shapes.push({
    kind: "path",
    stroke: palette.hatchLine,
    width: 1,
    points: [next + 1, 8, next + 11, 0],
  });
  shapes.push({ kind: "text", x: next + 18, y: HEIGHT / 2, text: "no pair", colour: palette.muted, size: 11 });
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
