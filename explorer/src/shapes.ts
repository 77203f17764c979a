/** Drawings as lists of shapes: the same list goes on the screen, into a PNG and, as vectors, into an SVG. */

export type Shape =
  | {
      kind: "text";
      x: number;
      y: number;
      text: string;
      colour: string;
      size?: number;
      anchor?: Anchor;
      turn?: boolean;
      bold?: boolean;
    }
  | {
      kind: "path";
      points: number[];
      stroke?: string;
      fill?: string;
      width?: number;
      opacity?: number;
      dash?: number[];
    }
  | {
      kind: "box";
      x: number;
      y: number;
      width: number;
      height: number;
      fill?: string;
      stroke?: string;
      line?: number;
      opacity?: number;
    }
  | { kind: "curve"; from: [number, number]; to: [number, number]; stroke: string; width: number; opacity: number; dash?: number[] }
  | { kind: "image"; image: HTMLCanvasElement; x: number; y: number; width: number; height: number }
  | {
      kind: "group";
      x: number;
      y: number;
      clip?: { x: number; y: number; width: number; height: number };
      shapes: Shape[];
    };

type Anchor = "start" | "middle" | "end";

export interface Picture {
  title: string;
  width: number;
  height: number;
  shapes: Shape[];
}

export const FONT = 'ui-sans-serif, system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';
export const TEXT_SIZE = 12;

export function drawShapes(context: CanvasRenderingContext2D, shapes: Shape[]): void {
  for (const shape of shapes) drawShape(context, shape);
}

function drawShape(context: CanvasRenderingContext2D, shape: Shape): void {
  context.globalAlpha = "opacity" in shape ? (shape.opacity ?? 1) : 1;
  if (shape.kind === "text") drawText(context, shape);
  else if (shape.kind === "path") drawPath(context, shape);
  else if (shape.kind === "curve") drawCurve(context, shape);
  else if (shape.kind === "box") {
    const { x, y, width, height } = shape;
    if (shape.fill) {
      context.fillStyle = shape.fill;
      context.fillRect(x, y, width, height);
    }
    if (shape.stroke) {
      context.strokeStyle = shape.stroke;
      context.lineWidth = shape.line ?? 1;
      context.strokeRect(x, y, width, height);
    }
  } else if (shape.kind === "image") {
    context.imageSmoothingEnabled = false;
    context.drawImage(shape.image, shape.x, shape.y, shape.width, shape.height);
  } else {
    context.save();
    context.translate(shape.x, shape.y);
    if (shape.clip) {
      context.beginPath();
      context.rect(shape.clip.x, shape.clip.y, shape.clip.width, shape.clip.height);
      context.clip();
    }
    drawShapes(context, shape.shapes);
    context.restore();
  }
  context.globalAlpha = 1;
}

function font({ size = TEXT_SIZE, bold }: { size?: number; bold?: boolean }): string {
  return `${bold ? "600 " : ""}${size}px ${FONT}`;
}

let measuring: CanvasRenderingContext2D | null = null;

/** How many pixels a text takes. */
export function textWidth(text: string, style: { size?: number; bold?: boolean }): number {
  measuring ??= document.createElement("canvas").getContext("2d");
  if (!measuring) return 7 * text.length;
  measuring.font = font(style);
  return measuring.measureText(text).width;
}

/** A text, its end cut off where it is wider than so many pixels. */
export function cutToWidth(text: string, width: number, style: { size?: number; bold?: boolean }): string {
  if (textWidth(text, style) <= width) return text;
  const letters = [...text];
  while (letters.length > 1 && textWidth(`${letters.join("")}…`, style) > width) letters.pop();
  return `${letters.join("")}…`;
}

function drawText(context: CanvasRenderingContext2D, shape: Extract<Shape, { kind: "text" }>): void {
  context.save();
  context.translate(shape.x, shape.y);
  if (shape.turn) context.rotate(-Math.PI / 2);
  context.font = font(shape);
  context.textAlign = shape.anchor === "middle" ? "center" : (shape.anchor ?? "start");
  context.textBaseline = "middle";
  context.direction = "ltr";
  context.fillStyle = shape.colour;
  context.fillText(shape.text, 0, 0);
  context.restore();
}

function drawPath(context: CanvasRenderingContext2D, shape: Extract<Shape, { kind: "path" }>): void {
  context.beginPath();
  for (let i = 0; i < shape.points.length; i += 2) context.lineTo(shape.points[i], shape.points[i + 1]);
  if (shape.fill) {
    context.fillStyle = shape.fill;
    context.fill();
  }
  if (!shape.stroke) return;
  context.setLineDash(shape.dash ?? []);
  context.strokeStyle = shape.stroke;
  context.lineWidth = shape.width ?? 1;
  context.stroke();
  context.setLineDash([]);
}

function drawCurve(context: CanvasRenderingContext2D, shape: Extract<Shape, { kind: "curve" }>): void {
  const [x0, y0] = shape.from;
  const [x1, y1] = shape.to;
  const middle = (x0 + x1) / 2;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(middle, y0, middle, y1, x1, y1);
  context.strokeStyle = shape.stroke;
  context.lineWidth = shape.width;
  context.lineCap = shape.dash ? "butt" : "round";
  context.setLineDash(shape.dash ?? []);
  context.stroke();
  context.setLineDash([]);
}
