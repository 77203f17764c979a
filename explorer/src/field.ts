/** Fields: the weights of a head, or the difference of two heads, as rasters for a panel. */

import { type Context, headName, headTitle } from "./context.ts";
import type { Need } from "./loader.ts";
import { coarsest, type TileIndex, tileRegion } from "./pyramid.ts";
import { difference, greatest, less, normalised, pool, quantile, type Raster, rowMaxima } from "./raster.ts";
import { type AttentionMap, EXACT, type Reduce, type Region, TILE } from "./types.ts";

export const CLIPPED = 0.99;

/** Entropy and greatest weight of each row, what each key receives. */
export type Profile = "entropy" | "largest" | "received";

export interface Settings {
  reduce: Reduce;
  normalise: boolean;
  /** Whether the last colour stands for the last hundredth of cells, too. */
  clip: boolean;
  /** Whether the last colour of a part of the map stands for what is in sight. */
  sight?: boolean;
}

export interface Field {
  readonly map: AttentionMap;
  readonly mapIndex: number;
  readonly title: string;
  readonly signed: boolean;
  /** The heads that it shows, for profiles and values. */
  readonly heads: readonly HeadField[];
  offers(level: number, region?: Region): boolean;
  pooled(need: Need, level: number, settings: Settings): Raster | undefined;
  exact(need: Need, tile: TileIndex, factor: number, settings: Settings): Raster | undefined;
  /** The value that has the last colour. */
  maximum(need: Need, level: number, settings: Settings): number | undefined;
  /** One exact weight. */
  value(need: Need, row: number, column: number): number | undefined;
  /** By what rows are divided where they are, in words. */
  divisor(level: number, reduce: Reduce): string;
}

export class HeadField implements Field {
  readonly signed = false;
  readonly map: AttentionMap;
  readonly title: string;

  constructor(
    readonly context: Context,
    readonly mapIndex: number,
    readonly head: number,
  ) {
    this.map = context.meta.maps[mapIndex];
    this.title = headTitle(context, mapIndex, head);
  }

  get heads(): readonly HeadField[] {
    return [this];
  }

  offers(level: number, region?: Region): boolean {
    return this.context.offers(this.mapIndex, this.head, level, region);
  }

  pooled(need: Need, level: number, settings: Settings): Raster | undefined {
    const raster = this.level(need, level, settings.reduce);
    if (!raster || !settings.normalise) return raster;
    return this.kept(`${raster.id} rows`, raster.data.byteLength, () => {
      const maxima = rowMaxima(raster);
      return normalised(raster, (row) => maxima[row]);
    });
  }

  exact(need: Need, tile: TileIndex, factor: number, settings: Settings): Raster | undefined {
    let raster = this.tile(need, tile);
    if (!raster) return undefined;
    if (settings.normalise) {
      const maxima = this.rowMaxima(need, raster, tile);
      if (!maxima) return undefined;
      const plain = raster;
      raster = this.kept(`${plain.id} rows`, plain.data.byteLength, () => normalised(plain, maxima));
    }
    if (factor === 1) return raster;
    const fine = raster;
    const id = `${fine.id} ${settings.reduce} ${factor}`;
    return this.kept(id, fine.data.byteLength / factor / factor, () => pool(fine, factor, settings.reduce));
  }

  maximum(need: Need, level: number, settings: Settings): number | undefined {
    if (settings.normalise) return 1;
    const from = level === EXACT || settings.reduce === "max" ? coarsest(this.map, (at) => this.offers(at)) : level;
    const raster =
      from === EXACT
        ? this.tile(need, { row: 0, column: 0 })
        : this.level(need, from, level === EXACT ? "max" : settings.reduce);
    return raster && this.last(raster, settings.clip);
  }

  value(need: Need, row: number, column: number): number | undefined {
    const tile = { row: Math.floor(row / TILE), column: Math.floor(column / TILE) };
    const there = this.context.loader.peek<Float32Array>(this.tileKey(tile));
    if (there) {
      const region = tileRegion(this.map, tile);
      return there[(row - region.row0) * (region.column1 - region.column0) + column - region.column0];
    }
    const region = { row0: row, row1: row + 1, column0: column, column1: column + 1 };
    const key = `weight ${this.mapIndex}/${this.head}/${row}/${column}`;
    return need(key, (signal) => this.context.source.weights(this.mapIndex, this.head, region, signal))?.[0];
  }

  divisor(level: number, reduce: Reduce): string {
    const whole = level === EXACT && (this.map.keys <= TILE || this.tells("largest"));
    const from = level === EXACT ? this.map.levels.findIndex((_, at) => this.offers(at)) : level;
    if (whole || from < 0) return "row maximum";
    const rows = this.map.cells[from][0];
    if (level !== EXACT && reduce === "mean") return "greatest mean of the row";
    return rows === 1 ? "row maximum" : `maximum of ${rows} rows`;
  }

  profile(need: Need, which: Profile): Float32Array | undefined {
    if (!this.tells(which)) return undefined;
    return need(`profile ${this.mapIndex}/${this.head}/${which}`, (signal) =>
      this.context.source.profile(this.mapIndex, this.head, which, signal),
    );
  }

  private tells(which: Profile): boolean {
    return (this.context.meta.profiles ?? ["entropy", "received"]).includes(which);
  }

  private level(need: Need, level: number, reduce: Reduce): Raster | undefined {
    const id = `level ${this.mapIndex}/${this.head}/${level}/${reduce}`;
    const [rows, columns] = this.map.levels[level];
    // The overview has the heads of the map alone, and not their means.
    const own = this.head < this.map.heads;
    if (own && this.context.meta.overview && this.context.source.overview && level === this.map.levels.length - 1) {
      const all = this.overview(need, reduce, rows * columns);
      const start = this.head * rows * columns;
      return all && { id, rows, columns, data: all.subarray(start, start + rows * columns) };
    }
    const data = need(id, async (signal) => {
      const array = await this.context.source.pooled(this.mapIndex, this.head, level, reduce, signal);
      return sized(array, rows * columns, `level ${level}`);
    });
    return data && { id, rows, columns, data };
  }

  /** The coarsest level of all heads, which are shown together. */
  private overview(need: Need, reduce: Reduce, size: number): Float32Array | undefined {
    return need(`overview ${this.mapIndex}/${reduce}`, async (signal) => {
      const all = await this.context.source.overview?.(this.mapIndex, reduce, signal);
      return sized(all ?? new Float32Array(), this.map.heads * size, "the overview");
    });
  }

  private tile(need: Need, tile: TileIndex): Raster | undefined {
    const region = tileRegion(this.map, tile);
    const [rows, columns] = [region.row1 - region.row0, region.column1 - region.column0];
    const id = this.tileKey(tile);
    const data = need(id, async (signal) =>
      sized(await this.context.source.weights(this.mapIndex, this.head, region, signal), rows * columns, "a tile"),
    );
    return data && { id, rows, columns, data };
  }

  private tileKey(tile: TileIndex): string {
    return `tile ${this.mapIndex}/${this.head}/${tile.row}/${tile.column}`;
  }

  /** The greatest weight of each row of a tile: of the whole row if it can be known, else of its block of rows. */
  private rowMaxima(need: Need, raster: Raster, tile: TileIndex): ((row: number) => number) | undefined {
    if (this.map.keys <= TILE) {
      const own = rowMaxima(raster);
      return (row) => own[row];
    }
    if (this.tells("largest")) {
      const whole = this.profile(need, "largest");
      return whole && ((row) => whole[tile.row * TILE + row]);
    }
    const finest = this.map.levels.findIndex((_, level) => this.offers(level));
    if (finest < 0) return () => 1;
    const level = this.level(need, finest, "max");
    if (!level) return undefined;
    const blocks = this.kept(`${level.id} maxima`, 4 * level.rows, () => ({
      ...level,
      id: `${level.id} maxima`,
      columns: 1,
      data: rowMaxima(level),
    }));
    return (row) => blocks.data[Math.floor((tile.row * TILE + row) / this.map.cells[finest][0])];
  }

  /** The value of the last colour: the greatest, or the one that a hundredth of all cells exceed. */
  private last(raster: Raster, clip: boolean): number {
    const id = `${raster.id} ${clip ? "clipped" : "greatest"}`;
    const compute = () => (clip ? quantile(raster.data, CLIPPED) : greatest(raster.data));
    return this.kept(id, 64, () => ({ id, rows: 1, columns: 1, data: Float32Array.of(compute()) })).data[0];
  }

  private kept(id: string, bytes: number, compute: () => Raster): Raster {
    return this.context.derived.get(id, bytes, compute);
  }
}

/** First minus second, of one atlas or of two; both of the same shape. */
export class DifferenceField implements Field {
  readonly signed = true;
  readonly heads: readonly HeadField[];
  /** Before the names of what the second needs, where that is of another atlas. */
  private readonly before: string;

  constructor(
    private readonly context: Context,
    private readonly first: HeadField,
    private readonly second: HeadField,
  ) {
    this.heads = [first, second];
    this.before = first.context === second.context ? "" : `atlas ${second.context.atlas.number} `;
  }

  get map(): AttentionMap {
    return this.first.map;
  }

  get mapIndex(): number {
    return this.first.mapIndex;
  }

  get title(): string {
    const { first, second } = this;
    if (!this.before) return `A − B · ${first.title}  −  ${second.title}`;
    const name = headName(first.context, first.mapIndex, first.head);
    return `${first.context.atlas.label} − ${second.context.atlas.label} · ${name}`;
  }

  offers(level: number, region?: Region): boolean {
    return this.first.offers(level, region) && this.second.offers(level, region);
  }

  pooled(need: Need, level: number, settings: Settings): Raster | undefined {
    return this.less(this.first.pooled(need, level, settings), this.second.pooled(this.its(need), level, settings));
  }

  exact(need: Need, tile: TileIndex, factor: number, settings: Settings): Raster | undefined {
    return this.less(this.first.exact(need, tile, factor, settings), this.second.exact(this.its(need), tile, factor, settings));
  }

  maximum(need: Need, level: number, settings: Settings): number | undefined {
    const a = this.first.maximum(need, level, settings);
    const b = this.second.maximum(this.its(need), level, settings);
    return a === undefined || b === undefined ? undefined : Math.max(a, b);
  }

  value(need: Need, row: number, column: number): number | undefined {
    const a = this.first.value(need, row, column);
    const b = this.second.value(this.its(need), row, column);
    return a === undefined || b === undefined ? undefined : less(a, b);
  }

  divisor(level: number, reduce: Reduce): string {
    return this.first.divisor(level, reduce);
  }

  private its(need: Need): Need {
    return this.before ? (key, load) => need(this.before + key, load) : need;
  }

  private less(a: Raster | undefined, b: Raster | undefined): Raster | undefined {
    if (!a || !b) return undefined;
    return this.context.derived.get(`${a.id} - ${this.before}${b.id}`, a.data.byteLength, () => difference(a, b));
  }
}

export function sameShape(a: AttentionMap, b: AttentionMap): boolean {
  return a.queries === b.queries && a.keys === b.keys && String(a.levels) === String(b.levels);
}

function sized(array: Float32Array, length: number, what: string): Float32Array {
  if (array.length !== length) throw new Error(`${what} has ${array.length} numbers; its shape says ${length}`);
  return array;
}
