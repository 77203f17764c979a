/** The heads as one picture: a title, layer names, thumbnails with their numbers and roles, and a legend. */

import { shortRole } from "../badges.ts";
import { type Context } from "../context.ts";
import { legendShapes } from "../legend.ts";
import type { Palette } from "../palette.ts";
import { cutToWidth, type Picture, type Shape, textWidth } from "../shapes.ts";
import { plain } from "../text.ts";
import type { Thumbnail } from "../thumbnail.ts";
import type { Role } from "../types.ts";

export interface PicturedHead {
  thumbnail: Thumbnail;
  name: string;
  /** The value by which heads are sorted; "" where they are not. */
  value: string;
  pinned: boolean;
  roles: readonly Role[];
}

/** The heads of a layer, or all heads in one row that is named "". */
export interface PicturedRow {
  name: string;
  heads: readonly PicturedHead[];
}

const MARGIN = 16;
const GAP = 14;
const MOST_ACROSS = 16;
const MOST_NAME = 190;
const CAPTION = 17;
const HATCH = 6;

export function gridPicture(context: Context, rows: readonly PicturedRow[], about: string): Picture {
  const palette = context.palette();
  const state = context.state();
  const count = rows.reduce((sum, row) => sum + row.heads.length, 0);
  const side = count <= 24 ? 148 : 72;
  const lines = rows.map(({ name }) => nameLines(name));
  const names = Math.max(0, ...lines.flat().map((line) => textWidth(line, { size: 11 })));
  const left = MARGIN + (names ? Math.ceil(names) + 12 : 0);
  const valued = rows.some((row) => row.heads.some((head) => head.value));
  const [wide, high] = [side + GAP, side + CAPTION + (valued ? 14 : 0) + 10];
  const across = Math.min(MOST_ACROSS, Math.max(1, ...rows.map((row) => row.heads.length)));
  const width = Math.max(left + across * wide + MARGIN - GAP, 560);
  const shapes: Shape[] = [];
  const title = `${plain(context.meta.title || "attention", 200)}: heads by layer`;
  const ink = { kind: "text", x: MARGIN, colour: palette.ink, bold: true, size: 14 } as const;
  shapes.push({ ...ink, y: 22, text: cutToWidth(title, width - 2 * MARGIN, ink) });
  const muted = { kind: "text", colour: palette.muted, size: 11 } as const;
  const told = `${about} Rows of a map: queries; columns: keys.`;
  shapes.push({ ...muted, x: MARGIN, y: 42, text: cutToWidth(told, width - 2 * MARGIN, muted) });
  let top = 60;
  rows.forEach((row, at) => {
    lines[at].forEach((line, i) => shapes.push({ ...muted, x: MARGIN, y: top + 8 + 14 * i, text: line }));
    row.heads.forEach((head, i) => {
      const x = left + (i % across) * wide;
      const y = top + Math.floor(i / across) * high;
      shapes.push({ kind: "group", x, y, shapes: headShapes(head, side, palette) });
    });
    top += Math.max(Math.ceil(row.heads.length / across) * high, 14 * lines[at].length + 10);
  });
  const most = state.normalise ? "row maximum" : state.clip ? "≥ 99 % of the cells of the head" : "greatest of the head";
  const heads = rows.flatMap((row) => row.heads.map(({ thumbnail }) => thumbnail.field));
  const legend = {
    maximum: undefined,
    most,
    signed: false,
    divisor: "",
    mean: state.reduce === "mean",
    broken: heads.some((field) => field.map.broken?.[field.head]),
    room: width - 2 * MARGIN,
  };
  shapes.push({ kind: "group", x: MARGIN, y: top + 10, shapes: legendShapes(legend, state, palette) });
  return { title, width, height: top + 34, shapes };
}

function headShapes({ thumbnail, name, value, pinned, roles }: PicturedHead, side: number, palette: Palette): Shape[] {
  const shapes: Shape[] = [
    ...(thumbnail.hasHoles ? hatch(side, palette) : []),
    { kind: "image", image: thumbnail.canvas, x: 0, y: 0, width: side, height: side },
    { kind: "box", x: -0.5, y: -0.5, width: side + 1, height: side + 1, stroke: palette.line },
  ];
  const text = { kind: "text", y: side + 10, colour: palette.muted, size: 10 } as const;
  const number = `${name}${pinned ? " ◆" : ""}`;
  shapes.push({ ...text, x: 0, text: cutToWidth(number, side, text) });
  let x = textWidth(number, text) + 5;
  for (const role of roles) {
    const label = shortRole(role);
    const room = textWidth(label, { size: 9 }) + 8;
    if (x + room > side + 4) break;
    shapes.push({ kind: "box", x, y: side + 4, width: room, height: 12, fill: palette.paper, stroke: palette.accent });
    shapes.push({ ...text, x: x + 4, size: 9, colour: palette.accent, text: label });
    x += room + 3;
  }
  if (value) shapes.push({ ...text, x: 0, y: side + CAPTION + 7, text: cutToWidth(value, side + GAP - 2, text) });
  return shapes;
}

/** Stripes under what a thumbnail leaves clear: pairs that do not exist. */
function hatch(side: number, palette: Palette): Shape[] {
  const lines: Shape[] = [];
  for (let at = HATCH; at < 2 * side; at += HATCH) {
    const [from, to] = [Math.max(0, at - side), Math.min(at, side)];
    lines.push({ kind: "path", points: [from, at - from, to, at - to], stroke: palette.hatchLine, width: 1 });
  }
  return [{ kind: "box", x: 0, y: 0, width: side, height: side, fill: palette.hatchPaper }, ...lines];
}

/** A dotted name in at most three lines of MOST_NAME pixels. */
function nameLines(name: string): string[] {
  const lines: string[] = [];
  for (const part of name.split(/(?<=[._])/).filter(Boolean)) {
    const longer = (lines.at(-1) ?? "") + part;
    if (lines.length && textWidth(longer, { size: 11 }) <= MOST_NAME) lines[lines.length - 1] = longer;
    else lines.push(cutToWidth(part, MOST_NAME, { size: 11 }));
  }
  return lines.length > 3 ? [...lines.slice(0, 2), cutToWidth(lines.slice(2).join(""), MOST_NAME, { size: 11 })] : lines;
}
