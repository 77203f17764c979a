/** Geometry of the deep zoom: which cells of a map lie where on the screen. */

import type { Region, Size } from "./types.ts";

/** The cell at the top left corner, and how many CSS pixels one cell takes. */
export interface Viewport {
  row: number;
  column: number;
  scale: number;
}

/** The same whatever the size of the window: the centre, and the cells across the shorter side. */
export interface Frame {
  row: number;
  column: number;
  span: number;
}

export interface Extent {
  rows: number;
  columns: number;
}

const LARGEST_CELL = 72;

/** The whole map, centred. */
export function fit(extent: Extent, size: Size): Viewport {
  const scale = Math.min(size.width / extent.columns, size.height / extent.rows, LARGEST_CELL);
  return clamp({ row: 0, column: 0, scale }, extent, size);
}

/** No smaller than fits, no larger than a cell can usefully be, no emptiness where cells could be. */
export function clamp(viewport: Viewport, extent: Extent, size: Size): Viewport {
  const least = Math.min(size.width / extent.columns, size.height / extent.rows, LARGEST_CELL);
  const scale = Math.min(Math.max(viewport.scale, least), LARGEST_CELL);
  return {
    row: held(viewport.row, extent.rows, size.height / scale),
    column: held(viewport.column, extent.columns, size.width / scale),
    scale,
  };
}

function held(start: number, count: number, seen: number): number {
  if (seen >= count) return (count - seen) / 2;
  return Math.min(Math.max(start, 0), count - seen);
}

/** Zoomed by `factor` with the cell under (x, y) kept in its place. */
export function zoomAt(viewport: Viewport, factor: number, x: number, y: number): Viewport {
  const scale = Math.min(viewport.scale * factor, LARGEST_CELL);
  return {
    row: viewport.row + y / viewport.scale - y / scale,
    column: viewport.column + x / viewport.scale - x / scale,
    scale,
  };
}

export function pan(viewport: Viewport, dx: number, dy: number): Viewport {
  return { ...viewport, row: viewport.row - dy / viewport.scale, column: viewport.column - dx / viewport.scale };
}

/** The cell under a point, or undefined outside the map. */
export function cellAt(viewport: Viewport, extent: Extent, x: number, y: number): [number, number] | undefined {
  const row = Math.floor(viewport.row + y / viewport.scale);
  const column = Math.floor(viewport.column + x / viewport.scale);
  return row >= 0 && column >= 0 && row < extent.rows && column < extent.columns ? [row, column] : undefined;
}

/** The cells that are at least partly seen. */
export function visible(viewport: Viewport, extent: Extent, size: Size): Region {
  return {
    row0: Math.max(0, Math.floor(viewport.row)),
    row1: Math.min(extent.rows, Math.ceil(viewport.row + size.height / viewport.scale)),
    column0: Math.max(0, Math.floor(viewport.column)),
    column1: Math.min(extent.columns, Math.ceil(viewport.column + size.width / viewport.scale)),
  };
}

export function toFrame(viewport: Viewport, size: Size): Frame {
  return {
    row: viewport.row + size.height / viewport.scale / 2,
    column: viewport.column + size.width / viewport.scale / 2,
    span: Math.min(size.width, size.height) / viewport.scale,
  };
}

export function fromFrame(frame: Frame, size: Size): Viewport {
  const scale = Math.min(size.width, size.height) / frame.span;
  return { row: frame.row - size.height / scale / 2, column: frame.column - size.width / scale / 2, scale };
}

/** The viewport a part of the way from one to another; sizes change by equal factors in equal times. */
export function between(from: Viewport, to: Viewport, part: number, size: Size): Viewport {
  const a = toFrame(from, size);
  const b = toFrame(to, size);
  const span = a.span * (b.span / a.span) ** part;
  // The centre moves with the span, so that the point that stays in place stays in place all the way.
  const moved = Math.abs(b.span - a.span) < 1e-9 * a.span ? part : (span - a.span) / (b.span - a.span);
  const centre = { row: a.row + (b.row - a.row) * moved, column: a.column + (b.column - a.column) * moved, span };
  return fromFrame(centre, size);
}
