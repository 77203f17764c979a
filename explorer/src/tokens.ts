/** Tokens by index, fetched in pieces when they become visible. */

import type { Loader, Need } from "./loader.ts";
import type { Meta, Side, Source } from "./types.ts";

const PIECE = 512;
const MOST_MATCHES = 200;

export class Tokens {
  constructor(
    private readonly source: Source,
    private readonly meta: Meta,
    private readonly loader: Loader,
  ) {}

  count(map: number, side: Side): number {
    return side === "query" ? this.meta.maps[map].queries : this.meta.maps[map].keys;
  }

  /** The token, or undefined until its piece has come. */
  at(need: Need, map: number, side: Side, index: number): string | undefined {
    const start = Math.floor(index / PIECE) * PIECE;
    return need(this.key(map, side, start), this.load(map, side, start))?.[index - start];
  }

  /** Indices of tokens that hold the text, whatever the case of its letters; and whether there are more. */
  async find(
    map: number,
    side: Side,
    text: string,
    signal: AbortSignal,
  ): Promise<{ indices: number[]; more: boolean }> {
    const wanted = text.toLowerCase();
    const indices: number[] = [];
    for (let start = 0; start < this.count(map, side); start += PIECE) {
      signal.throwIfAborted();
      const piece = await this.loader.once(this.key(map, side, start), this.load(map, side, start), signal);
      for (let i = 0; i < piece.length; i += 1) {
        if (!piece[i].toLowerCase().includes(wanted)) continue;
        if (indices.length === MOST_MATCHES) return { indices, more: true };
        indices.push(start + i);
      }
    }
    return { indices, more: false };
  }

  /** All tokens from start to stop - 1. */
  async range(map: number, side: Side, start: number, stop: number): Promise<string[]> {
    const all: string[] = [];
    for (let at = Math.floor(start / PIECE) * PIECE; at < stop; at += PIECE) {
      const piece = await this.loader.once(this.key(map, side, at), this.load(map, side, at));
      all.push(...piece.slice(Math.max(start - at, 0), Math.min(stop - at, PIECE)));
    }
    return all;
  }

  private key(map: number, side: Side, start: number): string {
    return `tokens ${map} ${side} ${start}`;
  }

  private load(map: number, side: Side, start: number): (signal: AbortSignal) => Promise<string[]> {
    const stop = Math.min(start + PIECE, this.count(map, side));
    return async (signal) => (await this.source.tokens(map, side, start, stop, signal)).map(String);
  }
}
