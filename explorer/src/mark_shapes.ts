/** Links over a heat map: discs and crosses, and boxes for those that people made. */

import type { Mark, Sign } from "./alignment.ts";
import type { GoldMark } from "./matching.ts";
import type { Palette } from "./palette.ts";
import type { Shape } from "./shapes.ts";
import type { Viewport } from "./viewport.ts";

const MOST_MARKS = 3000;
/** Cells of fewer pixels have dots. */
const SMALLEST = 5;

/** Dark under light, to be seen on any colour. */
const UNDER = "#000000";
const OVER = "#ffffff";

/** The signs in words. */
export const SIGNS: Record<Sign, string> = {
  link: "● link",
  right: "● right",
  wrong: "✕ wrong",
  outside: "○ of no word",
};

/** Outlines of blocks of cells, discs for links, crosses for wrong ones; dots where cells are too small. */
export function markShapes(viewport: Viewport, marks: Mark[], palette: Palette): Shape[] {
  const shapes: Shape[] = [];
  const every = Math.ceil(marks.length / MOST_MARKS);
  for (let i = 0; i < marks.length; i += every) {
    const mark = marks[i];
    const box = boxOf(viewport, mark.row, mark.column, mark.row + mark.rows, mark.column + mark.columns);
    const side = Math.min(box.width, box.height);
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    if (side < SMALLEST)
      shapes.push({
        kind: "box",
        x: x - 1.5,
        y: y - 1.5,
        width: 3,
        height: 3,
        fill: palette.paper,
        stroke: palette.ink,
      });
    else if (!mark.sign) shapes.push(...outline(box, 1.5));
    else shapes.push(...signShapes(mark.sign, x, y, Math.min(side * 0.2, 9)));
  }
  return shapes;
}

/** A disc, a ring, or a cross, of a radius. */
export function signShapes(sign: Sign, x: number, y: number, radius: number): Shape[] {
  if (sign === "outside") {
    return [
      { kind: "path", points: circle(x, y, radius), stroke: UNDER, width: 4 },
      { kind: "path", points: circle(x, y, radius), stroke: OVER, width: 2 },
    ];
  }
  if (sign !== "wrong") {
    return [
      { kind: "path", points: circle(x, y, radius + 1.5), fill: UNDER },
      { kind: "path", points: circle(x, y, radius), fill: OVER },
    ];
  }
  const strokes = [
    [x - radius, y - radius, x + radius, y + radius],
    [x - radius, y + radius, x + radius, y - radius],
  ];
  const line = Math.max(radius * 0.5, 1.5);
  return [
    ...strokes.map((points): Shape => ({ kind: "path", points, stroke: UNDER, width: line + 2.5 })),
    ...strokes.map((points): Shape => ({ kind: "path", points, stroke: OVER, width: line })),
  ];
}

/** Boxes around the cells of gold links: whole lines for sure ones, dashes for possible ones. */
export function goldShapes(viewport: Viewport, marks: GoldMark[]): Shape[] {
  return marks.flatMap(({ row0, row1, column0, column1, sure }) =>
    outline(boxOf(viewport, row0, column0, row1, column1), 2, sure ? undefined : [5, 4]),
  );
}

function outline(box: Box, width: number, dash?: number[]): Shape[] {
  const [x0, y0, x1, y1] = [box.x + 1.5, box.y + 1.5, box.x + box.width - 1.5, box.y + box.height - 1.5];
  const points = [x0, y0, x1, y0, x1, y1, x0, y1, x0, y0];
  return [
    // Whole below dashes too: between these it is seen on what is bright.
    { kind: "path", points, stroke: UNDER, width: width + 2, opacity: 0.75 },
    { kind: "path", points, stroke: OVER, width, dash },
  ];
}

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

function boxOf(viewport: Viewport, row0: number, column0: number, row1: number, column1: number): Box {
  const { scale } = viewport;
  return {
    x: (column0 - viewport.column) * scale,
    y: (row0 - viewport.row) * scale,
    width: (column1 - column0) * scale,
    height: (row1 - row0) * scale,
  };
}

function circle(x: number, y: number, radius: number): number[] {
  const points: number[] = [];
  for (let step = 0; step <= 20; step += 1) {
    const angle = (step / 10) * Math.PI;
    points.push(x + radius * Math.cos(angle), y + radius * Math.sin(angle));
  }
  return points;
}
