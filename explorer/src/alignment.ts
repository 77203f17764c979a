/** Argmax alignment: the key with the largest weight of each visible query. */

import type { Field, Settings } from "./field.ts";
import type { Need } from "./loader.ts";
import { tilesOf } from "./pyramid.ts";
import { argmaxima } from "./raster.ts";
import { EXACT, type Region, TILE } from "./types.ts";

export type Sign = "link" | "right" | "wrong" | "outside";

/** A cell, or a block of cells where only pooled levels are known. */
export interface Mark {
  row: number;
  column: number;
  rows: number;
  columns: number;
  /** How it is drawn, an outline where nothing is said; "outside" is a link of tokens that gold links say nothing of. */
  sign?: Sign;
}

/** Rows of more keys are aligned by the finest pooled level. */
const MOST_KEYS = 1024;

const PLAIN: Settings = { reduce: "max", normalise: false, clip: false };

export function alignment(need: Need, field: Field, seen: Region): Mark[] {
  const pooledOnly = field.map.keys > MOST_KEYS || !field.offers(EXACT);
  return pooledOnly ? pooledMarks(need, field, seen) : exactMarks(need, field, seen);
}

function exactMarks(need: Need, field: Field, seen: Region): Mark[] {
  const marks: Mark[] = [];
  const best = new Map<number, { column: number; value: number }>();
  const missing = new Set<number>();
  for (const tile of tilesOf({ ...seen, column0: 0, column1: field.map.keys })) {
    const raster = field.exact(need, tile, 1, PLAIN);
    if (!raster) {
      missing.add(tile.row);
      continue;
    }
    argmaxima(raster).forEach((column, i) => {
      if (column < 0) return;
      const value = raster.data[i * raster.columns + column];
      const row = tile.row * TILE + i;
      const before = best.get(row);
      if (!before || value > before.value) best.set(row, { column: tile.column * TILE + column, value });
    });
  }
  for (const [row, { column }] of best) {
    if (!missing.has(Math.floor(row / TILE)) && row >= seen.row0 && row < seen.row1) {
      marks.push({ row, column, rows: 1, columns: 1 });
    }
  }
  return marks;
}

function pooledMarks(need: Need, field: Field, seen: Region): Mark[] {
  const level = field.map.levels.findIndex((_, at) => field.offers(at));
  const raster = level < 0 ? undefined : field.pooled(need, level, PLAIN);
  if (!raster) return [];
  const [rows, columns] = field.map.cells[level];
  const marks: Mark[] = [];
  argmaxima(raster).forEach((column, row) => {
    if (column >= 0 && (row + 1) * rows > seen.row0 && row * rows < seen.row1) {
      marks.push({ row: row * rows, column: column * columns, rows, columns });
    }
  });
  return marks;
}
