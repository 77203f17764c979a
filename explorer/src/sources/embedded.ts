/** The source of a static page: data embedded in the page as JSON. */

import { countTiles, type TileIndex, tilesOf } from "../pyramid.ts";
import { checkedMeta, EXACT, type Meta, type Reduce, type Region, type Side, type Source, TILE } from "../types.ts";
import { floats, type WrittenArray } from "./arrays.ts";

/**
 * What a static page holds as JSON. Keys: pooled "map/head/level/reduce", tiles "map/head/tile row/tile column" of
 * 256 × 256 weights cut at the edges of the map, profiles "map/head/which". `tokens[map].key` is left out where
 * the keys are the queries.
 */
export interface Embedded {
  meta: Meta;
  /** Of each map, or the number of an earlier one that has the same. */
  tokens: ({ query: string[]; key?: string[] } | number)[];
  pooled: Record<string, WrittenArray>;
  tiles: Record<string, WrittenArray>;
  profiles: Record<string, WrittenArray>;
  /** What is shown where the address tells nothing, as after # of a permalink. */
  state?: string;
}

export class EmbeddedSource implements Source {
  private readonly checked: Meta;
  /** By "map/head": how many of its tiles are there. */
  private readonly tiles = new Map<string, number>();

  constructor(private readonly held: Embedded) {
    this.checked = checkedMeta(held.meta);
    for (const key of Object.keys(held.tiles ?? {})) {
      const head = key.split("/").slice(0, 2).join("/");
      this.tiles.set(head, (this.tiles.get(head) ?? 0) + 1);
    }
  }

  get state(): string {
    return this.held.state ?? "";
  }

  static from(element: Element): EmbeddedSource {
    return new EmbeddedSource(JSON.parse(element.textContent ?? "") as Embedded);
  }

  async meta(): Promise<Meta> {
    return this.checked;
  }

  async tokens(map: number, side: Side, start: number, stop: number): Promise<string[]> {
    const told = this.held.tokens[map];
    const tokens = typeof told === "number" ? (this.held.tokens[told] as Exclude<typeof told, number>) : told;
    return ((side === "key" && tokens.key) || tokens.query).slice(start, stop);
  }

  pooled(map: number, head: number, level: number, reduce: Reduce): Promise<Float32Array> {
    return this.array(this.held.pooled, `${map}/${head}/${level}/${reduce}`);
  }

  profile(map: number, head: number, which: string): Promise<Float32Array> {
    return this.array(this.held.profiles, `${map}/${head}/${which}`);
  }

  async weights(map: number, head: number, region: Region): Promise<Float32Array> {
    const width = region.column1 - region.column0;
    const result = new Float32Array((region.row1 - region.row0) * width);
    for (let top = Math.floor(region.row0 / TILE) * TILE; top < region.row1; top += TILE) {
      for (let left = Math.floor(region.column0 / TILE) * TILE; left < region.column1; left += TILE) {
        const tile = await this.array(this.held.tiles, `${map}/${head}/${top / TILE}/${left / TILE}`);
        const columns = Math.min(TILE, this.checked.maps[map].keys - left);
        const first = Math.max(left, region.column0);
        const last = Math.min(left + columns, region.column1);
        for (let row = Math.max(top, region.row0); row < Math.min(top + TILE, region.row1); row += 1) {
          const start = (row - top) * columns - left;
          result.set(tile.subarray(start + first, start + last), (row - region.row0) * width + first - region.column0);
        }
      }
    }
    return result;
  }

  offers(map: number, head: number, level: number, region?: Region): boolean {
    if (level === EXACT) {
      const { queries, keys } = this.checked.maps[map];
      const all = { row0: 0, row1: queries, column0: 0, column1: keys };
      const held = this.tiles.get(`${map}/${head}`) ?? 0;
      if (held === countTiles(all)) return true;
      const within = ({ row, column }: TileIndex) => Object.hasOwn(this.held.tiles, `${map}/${head}/${row}/${column}`);
      return region !== undefined && held > 0 && countTiles(region) <= held && tilesOf(region).every(within);
    }
    return `${map}/${head}/${level}/max` in this.held.pooled || `${map}/${head}/${level}/mean` in this.held.pooled;
  }

  private async array(arrays: Record<string, WrittenArray>, key: string): Promise<Float32Array> {
    if (!Object.hasOwn(arrays ?? {}, key)) throw new Error("this part was not written into the page");
    return floats(arrays[key]);
  }
}
