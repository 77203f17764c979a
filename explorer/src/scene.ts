/** The rasters that are drawn for a viewport: the chosen level, over a coarser one until it is loaded. */

import type { Field, Settings } from "./field.ts";
import type { Need } from "./loader.ts";
import { type Choice, choose, tileRegion, tilesOf } from "./pyramid.ts";
import type { Raster } from "./raster.ts";
import type { Box, Quad } from "./rendering/painter.ts";
import { sightMaximum } from "./sight.ts";
import { EXACT, type Size, TILE } from "./types.ts";
import { type Viewport, visible } from "./viewport.ts";

export interface Scene {
  quads: Quad[];
  choice: Choice;
  complete: boolean;
  /** The value of the last colour; undefined until it is known. */
  maximum: number | undefined;
}

/** `need` asks for what is not there, `peek` only looks. */
interface Needs {
  need: Need;
  peek: Need;
}

/** The quads in device pixels; `ratio` device pixels make one CSS pixel. */
export function scene(
  { need, peek }: Needs,
  field: Field,
  viewport: Viewport,
  size: Size,
  ratio: number,
  settings: Settings,
): Scene {
  const seen = visible(viewport, { rows: field.map.queries, columns: field.map.keys }, size);
  const choice = choose(field.map, viewport.scale * ratio, seen, (level) => field.offers(level, seen));
  const device: Viewport = { ...viewport, scale: viewport.scale * ratio };
  const whole = field.maximum(need, choice.level, settings);
  if (choice.level !== EXACT) {
    const raster = field.pooled(need, choice.level, settings);
    const [high, wide] = field.map.cells[choice.level];
    const own = raster && sightMaximum(field, seen, [{ raster, row: 0, column: 0, high, wide }], settings);
    const maximum = own ?? whole;
    const quad = levelQuad(need, field, choice.level, settings, device, maximum);
    if (quad) return { quads: [quad], choice, complete: true, maximum };
    const below = underlay({ need, peek }, field, choice.level, settings, device, maximum);
    return { quads: below, choice, complete: false, maximum };
  }
  const tiles = tilesOf(seen);
  const there = tiles.flatMap((tile) => {
    const raster = field.exact(need, tile, choice.factor, settings);
    return raster ? [{ tile, raster }] : [];
  });
  const { factor } = choice;
  const drawn = there.map(({ tile, raster }) => ({ raster, row: tile.row * TILE, column: tile.column * TILE, high: factor, wide: factor }));
  const maximum = sightMaximum(field, seen, drawn, settings) ?? whole;
  const quads: Quad[] = [];
  for (const { tile, raster } of there) {
    if (maximum === undefined) continue;
    const region = tileRegion(field.map, tile);
    quads.push({
      raster,
      source: {
        x: 0,
        y: 0,
        width: (region.column1 - region.column0) / choice.factor,
        height: (region.row1 - region.row0) / choice.factor,
      },
      target: boxOf(device, region.row0, region.column0, region.row1, region.column1),
      maximum,
    });
  }
  const complete = quads.length === tiles.length;
  return {
    quads: complete ? quads : [...underlay({ need, peek }, field, 0, settings, device, maximum), ...quads],
    choice,
    complete,
    maximum,
  };
}

/** The finest level that is there already, from `level` to the coarsest, which is asked for. */
function underlay({ need, peek }: Needs, field: Field, level: number, settings: Settings, device: Viewport, maximum: number | undefined): Quad[] {
  const last = field.map.levels.length - 1;
  for (let at = level; at <= last; at += 1) {
    if (!field.offers(at)) continue;
    const quad = levelQuad(at === last ? need : peek, field, at, settings, device, maximum);
    if (quad) return [quad];
  }
  return [];
}

/** `last`: the value of the last colour; that of the level where it is not known. */
function levelQuad(need: Need, field: Field, level: number, settings: Settings, device: Viewport, last: number | undefined): Quad | undefined {
  const raster: Raster | undefined = field.pooled(need, level, settings);
  const maximum = last ?? field.maximum(need, level, settings);
  if (!raster || maximum === undefined) return undefined;
  const { queries, keys, cells } = field.map;
  const [rows, columns] = cells[level];
  return {
    raster,
    source: { x: 0, y: 0, width: keys / columns, height: queries / rows },
    target: boxOf(device, 0, 0, queries, keys),
    maximum,
  };
}

/** The pixels of some cells; neighbours share their edge, since each edge is rounded by itself. */
function boxOf(device: Viewport, row0: number, column0: number, row1: number, column1: number): Box {
  const x = Math.round((column0 - device.column) * device.scale);
  const y = Math.round((row0 - device.row) * device.scale);
  return {
    x,
    y,
    width: Math.max(Math.round((column1 - device.column) * device.scale) - x, 1),
    height: Math.max(Math.round((row1 - device.row) * device.scale) - y, 1),
  };
}
