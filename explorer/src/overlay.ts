/** Shapes over and around a panel's raster: rulers, border, crosshair, marks, profiles. */

import type { Mark } from "./alignment.ts";
import type { Context } from "./context.ts";
import type { Field } from "./field.ts";
import { type Kept, onePair } from "./kept.ts";
import type { Need } from "./loader.ts";
import { goldShapes, markShapes } from "./mark_shapes.ts";
import type { GoldMark } from "./matching.ts";
import type { Palette } from "./palette.ts";
import { greatestWords, profileShapes } from "./profiles.ts";
import { type Ruler, rulerShapes } from "./rulers.ts";
import { type Shape, textWidth } from "./shapes.ts";
import type { Side, Size } from "./types.ts";
import type { Viewport } from "./viewport.ts";

export interface Insets {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

export interface Decoration {
  viewport: Viewport;
  size: Size;
  insets: Insets;
  /** Whether there is room for profiles. */
  wide: boolean;
  hovered?: [number, number];
  kept: Kept;
  marks: Mark[];
  gold: GoldMark[];
  rows: "said" | "read";
}

const ROOM = 132;

/** Rulers, border, crosshair, marks and profiles; (0, 0) is the corner of the panel. */
export function decorationShapes(need: Need, context: Context, field: Field, on: Decoration): Shape[] {
  const palette = context.palette();
  const { size, insets } = on;
  const inside: Shape[] = [...goldShapes(on.viewport, on.gold), ...markShapes(on.viewport, on.marks, palette)];
  if (on.hovered) inside.push(...crossShapes(on, on.hovered, palette, [3, 3]));
  inside.push(...keptShapes(on, palette));
  const clip = { x: 0, y: 0, width: size.width, height: size.height };
  return [
    { kind: "group", x: insets.left, y: insets.top, clip, shapes: inside },
    {
      kind: "box",
      x: insets.left - 0.5,
      y: insets.top - 0.5,
      width: size.width + 1,
      height: size.height + 1,
      stroke: palette.line,
    },
    ...rulers(need, context, field, on, palette),
    ...names(field, on, palette),
    ...(on.wide ? profiles(need, field, on, palette) : []),
  ];
}

function rulers(need: Need, context: Context, field: Field, on: Decoration, palette: Palette): Shape[] {
  const { viewport, size, insets } = on;
  const { kept, hovered } = on;
  const token = (side: Side) => (index: number) => context.tokens.at(need, field.mapIndex, side, index);
  const common = { scale: viewport.scale, width: (label: string) => textWidth(label, { bold: true }) };
  const left: Ruler = {
    ...common,
    side: "left",
    start: viewport.row,
    length: size.height,
    count: field.map.queries,
    token: token("query"),
    strong: hovered ? [...kept.query, hovered[0]] : kept.query,
    room: Math.min(insets.left, ROOM) - 12,
  };
  const top: Ruler = {
    ...common,
    side: "top",
    start: viewport.column,
    length: size.width,
    count: field.map.keys,
    token: token("key"),
    strong: hovered ? [...kept.key, hovered[1]] : kept.key,
    room: insets.top - 12,
  };
  const beside = { x: 4 - insets.left, y: -8, width: insets.left, height: size.height + 16 };
  const above = { x: -8, y: 4 - insets.top, width: size.width + 16, height: insets.top };
  const at = { kind: "group", x: insets.left, y: insets.top } as const;
  return [
    { ...at, clip: beside, shapes: rulerShapes(left, palette) },
    { ...at, clip: above, shapes: rulerShapes(top, palette) },
  ];
}

function names(field: Field, { insets, wide, rows }: Decoration, palette: Palette): Shape[] {
  const cross = field.map.kind === "cross";
  const [query, key] = cross ? [`${rows === "read" ? "read" : "target"} ↓`, "source →"] : ["query ↓", "key →"];
  const style = { kind: "text", colour: palette.muted, size: 11 } as const;
  return [
    { ...style, x: insets.left - 8, y: insets.top - (wide ? 38 : 32), text: key, anchor: "end" },
    { ...style, x: insets.left - 8, y: insets.top - (wide ? 22 : 18), text: query, anchor: "end" },
  ];
}

function profiles(need: Need, field: Field, on: Decoration, palette: Palette): Shape[] {
  const { viewport, size, insets } = on;
  const shapes: Shape[] = [];
  const head = field.heads[0];
  if (field.heads.length > 1) return shapes;
  const received = head.profile(need, "received");
  const right = insets.left + size.width + 6;
  const below = insets.top + size.height + 6;
  const { scale } = viewport;
  const ofRows = [
    { which: "entropy", x: right },
    { which: "largest", x: right + 62 },
  ] as const;
  for (const { which, x } of ofRows) {
    const values = head.profile(need, which);
    if (!values) continue;
    const curve = profileShapes(
      { values, start: viewport.row, scale, length: size.height, reach: 48, side: "right" },
      palette,
    );
    shapes.push({ kind: "group", x, y: insets.top, shapes: curve });
    const end = { kind: "text", x, colour: palette.muted, size: 10 } as const;
    shapes.push({ kind: "text", x, y: insets.top - 12, text: which, colour: palette.muted, size: 11 });
    shapes.push({ ...end, y: insets.top + size.height + 10, text: greatestWords(values) });
  }
  if (received) {
    const curve = profileShapes(
      { values: received, start: viewport.column, scale, length: size.width, reach: 26, side: "below" },
      palette,
    );
    shapes.push({ kind: "group", x: insets.left, y: below, shapes: curve });
    shapes.push({
      kind: "text",
      x: insets.left - 8,
      y: below + 6,
      text: field.map.kind === "cross" ? "coverage" : "received",
      colour: palette.muted,
      size: 11,
      anchor: "end",
    });
    const most = greatestWords(received);
    shapes.push({ kind: "text", x: insets.left - 8, y: below + 20, text: most, colour: palette.muted, size: 10, anchor: "end" });
  }
  return shapes;
}

/** One pair as a cross; else a frame round each kept row and column, or a line where these are too small for one. */
function keptShapes(on: Decoration, palette: Palette): Shape[] {
  const one = onePair(on.kept);
  if (one) return crossShapes(on, one, palette);
  const { viewport, size } = on;
  const side = Math.max(viewport.scale, 1);
  const frame = (x: number, y: number, width: number, height: number): Shape[] => [
    { kind: "box", x, y, width, height, stroke: palette.paper, line: 3 },
    { kind: "box", x, y, width, height, stroke: palette.accent, line: 1.5 },
  ];
  const rows = on.kept.query.flatMap((row) => frame(0, (row - viewport.row) * viewport.scale, size.width, side));
  const columns = on.kept.key.flatMap((column) =>
    frame((column - viewport.column) * viewport.scale, 0, side, size.height),
  );
  return [...rows, ...columns];
}

function crossShapes(
  { viewport, size }: Decoration,
  [row, column]: [number, number],
  palette: Palette,
  dash?: number[],
): Shape[] {
  const side = viewport.scale;
  const x = (column - viewport.column) * side;
  const y = (row - viewport.row) * side;
  const line = (points: number[]): Shape[] => [
    // Light under dark, to be seen on any colour.
    { kind: "path", points, stroke: palette.paper, width: 2.5, opacity: 0.55 },
    { kind: "path", points, stroke: palette.ink, width: 1, opacity: 0.9, dash },
  ];
  const [middleX, middleY] = [x + side / 2, y + side / 2];
  if (side < 6) return [...line([0, middleY, size.width, middleY]), ...line([middleX, 0, middleX, size.height])];
  return [
    ...line([0, middleY, x, middleY]),
    ...line([x + side, middleY, size.width, middleY]),
    ...line([middleX, 0, middleX, y]),
    ...line([middleX, y + side, middleX, size.height]),
    { kind: "box", x, y, width: side, height: side, stroke: palette.paper, line: 4 },
    { kind: "box", x, y, width: side, height: side, stroke: palette.accent, line: 2 },
  ];
}
