/** Which level of a map's pyramid to show, and which tiles of it. */

import { type AttentionMap, EXACT, type Reduce, type Region, TILE } from "./types.ts";

/** A pooled level; or EXACT, of which `factor` × `factor` are pooled here where they are smaller than a pixel. */
export interface Choice {
  level: number;
  factor: number;
}

/** At most so many tiles of exact weights are shown, and so fetched, at once. */
export const MOST_TILES = 36;

/** A cell may be a little smaller than a pixel before the next coarser level is taken. */
const SMALLEST_CELL = 0.9;

/**
 * The finest level whose cells are not smaller than a pixel, exact weights if few enough tiles are seen.
 *
 * `pixels` is the number of device pixels along one weight; `offers` says which levels there are.
 */
export function choose(map: AttentionMap, pixels: number, seen: Region, offers: (level: number) => boolean): Choice {
  const tiles = countTiles(seen);
  const finest = map.levels.findIndex((_, level) => offers(level));
  if (offers(EXACT) && (tiles <= MOST_TILES || finest < 0)) {
    const factor = factorFor(pixels);
    const cell = finest < 0 ? Infinity : Math.min(...map.cells[finest]);
    if (factor < cell || factor === 1) return { level: EXACT, factor };
  }
  let chosen = finest;
  for (let level = finest; level >= 0 && level < map.levels.length; level += 1) {
    if (!offers(level)) continue;
    chosen = level;
    if (Math.min(...map.cells[level]) * pixels >= SMALLEST_CELL) break;
  }
  return { level: chosen, factor: 1 };
}

/** The least power of two that makes a cell of that many weights a pixel or more. */
export function factorFor(pixels: number): number {
  let factor = 1;
  while (factor < TILE && factor * pixels < SMALLEST_CELL) factor *= 2;
  return factor;
}

export interface TileIndex {
  row: number;
  column: number;
}

export function countTiles(region: Region): number {
  const { first, last } = tileRange(region);
  return (last.row - first.row) * (last.column - first.column);
}

function tileRange(region: Region): { first: TileIndex; last: TileIndex } {
  return {
    first: { row: Math.floor(region.row0 / TILE), column: Math.floor(region.column0 / TILE) },
    last: { row: Math.ceil(region.row1 / TILE), column: Math.ceil(region.column1 / TILE) },
  };
}

/** The tiles of exact weights that a region touches, those nearest its centre first. */
export function tilesOf(region: Region): TileIndex[] {
  const { first, last } = tileRange(region);
  const found: TileIndex[] = [];
  for (let row = first.row; row < last.row; row += 1) {
    for (let column = first.column; column < last.column; column += 1) found.push({ row, column });
  }
  const centre = { row: (region.row0 + region.row1) / 2 / TILE, column: (region.column0 + region.column1) / 2 / TILE };
  const distance = (tile: TileIndex) => Math.hypot(tile.row + 0.5 - centre.row, tile.column + 0.5 - centre.column);
  return found.sort((a, b) => distance(a) - distance(b));
}

/** The weights of a tile, cut at the edges of the map. */
export function tileRegion(map: AttentionMap, tile: TileIndex): Region {
  return {
    row0: tile.row * TILE,
    row1: Math.min((tile.row + 1) * TILE, map.queries),
    column0: tile.column * TILE,
    column1: Math.min((tile.column + 1) * TILE, map.keys),
  };
}

/** What single weights are called, "exact weights", or "max of 98 × 98 cells". */
export function words(map: AttentionMap, choice: Choice, reduce: Reduce, exact = "exact weights", rounded = "weights, rounded"): string {
  const [rows, columns] = choice.level === EXACT ? [choice.factor, choice.factor] : (map.cells[choice.level] ?? [1, 1]);
  if (choice.level === EXACT && rows === 1) return exact;
  // A level of single weights is kept in few digits.
  if (rows === 1 && columns === 1) return rounded;
  return `${reduce} of ${rows} × ${columns} cells`;
}

/** The coarsest level there is, or EXACT where a map is so short that it has none. */
export function coarsest(map: AttentionMap, offers: (level: number) => boolean): number {
  for (let level = map.levels.length - 1; level >= 0; level -= 1) if (offers(level)) return level;
  return EXACT;
}
