/** The colours of a part of a map: up to the greatest weight in sight. */

import { CLIPPED, type Field, type Settings } from "./field.ts";
import { quantileIn, type Raster } from "./raster.ts";
import type { Region } from "./types.ts";

/** What is drawn of a raster whose first cell is at (row, column), with cells of `high` × `wide` weights. */
export interface Drawn {
  raster: Raster;
  row: number;
  column: number;
  high: number;
  wide: number;
}

/** The value of the last colour; undefined where the whole map is seen, and where it is to be that of the whole map. */
export function sightMaximum(field: Field, seen: Region, drawn: readonly Drawn[], settings: Settings): number | undefined {
  const { queries, keys } = field.map;
  const whole = seen.row0 === 0 && seen.column0 === 0 && seen.row1 === queries && seen.column1 === keys;
  if (!settings.sight || settings.normalise || whole) return undefined;
  const parts = drawn.flatMap(({ raster, row, column, high, wide }) => {
    const cells = {
      row0: Math.max(Math.floor((seen.row0 - row) / high), 0),
      row1: Math.min(Math.ceil((seen.row1 - row) / high), raster.rows),
      column0: Math.max(Math.floor((seen.column0 - column) / wide), 0),
      column1: Math.min(Math.ceil((seen.column1 - column) / wide), raster.columns),
    };
    return cells.row1 > cells.row0 && cells.column1 > cells.column0 ? [{ raster, cells }] : [];
  });
  return quantileIn(parts, settings.clip ? CLIPPED : 1) || undefined;
}
