/** Tokens by index, fetched in pieces when they become visible. */

import type { Loader, Need } from "./loader.ts";
import { MOST_OVERLAP, type PhraseMatch, phraseMatches } from "./phrases.ts";
import type { Meta, Side, Source } from "./types.ts";

/** The self-attention whose rows are what the decoder has read where a row of cross-attention is said, if it is there. */
export function mapOfRead(meta: Meta, map: number): number | undefined {
  const cross = meta.maps[map];
  if (cross.kind !== "cross" || !cross.texts) return undefined;
  const found = meta.maps.findIndex(
    ({ kind, queries, keys, texts, hypothesis, sequence }) =>
      kind === "self" &&
      queries === cross.queries &&
      keys === queries &&
      sequence === cross.sequence &&
      hypothesis?.rank === cross.hypothesis?.rank &&
      texts !== undefined &&
      !cross.texts?.includes(texts[0]),
  );
  return found < 0 ? undefined : found;
}

const PIECE = 512;
const MOST_MATCHES = 200;

export class Tokens {
  constructor(
    private readonly source: Source,
    private readonly meta: Meta,
    private readonly loader: Loader,
    /** Whether rows of a translation are called by what the decoder has read. */
    private readonly read: () => boolean = () => false,
  ) {}

  count(map: number, side: Side): number {
    return side === "query" ? this.meta.maps[map].queries : this.meta.maps[map].keys;
  }

  /** The token, or undefined until its piece has come. */
  at(need: Need, map: number, side: Side, index: number): string | undefined {
    const start = Math.floor(index / PIECE) * PIECE;
    map = this.place(map, side);
    return need(this.key(map, side, start), this.load(map, side, start))?.[index - start];
  }

  /** Tokens and runs of tokens that hold the text, as `phraseMatches`; and whether there are more. */
  async find(
    map: number,
    side: Side,
    text: string,
    signal: AbortSignal,
  ): Promise<{ matches: PhraseMatch[]; more: boolean }> {
    map = this.place(map, side);
    const matches: PhraseMatch[] = [];
    let before: string[] = [];
    for (let start = 0; start < this.count(map, side); start += PIECE) {
      signal.throwIfAborted();
      const piece = await this.loader.once(this.key(map, side, start), this.load(map, side, start), signal);
      matches.push(...phraseMatches([...before, ...piece], text, start - before.length, before.length));
      if (matches.length > MOST_MATCHES) return { matches: matches.slice(0, MOST_MATCHES), more: true };
      before = piece.slice(-MOST_OVERLAP);
    }
    return { matches, more: false };
  }

  /** All tokens from start to stop - 1. */
  async range(map: number, side: Side, start: number, stop: number): Promise<string[]> {
    const all: string[] = [];
    map = this.place(map, side);
    for (let at = Math.floor(start / PIECE) * PIECE; at < stop; at += PIECE) {
      const piece = await this.loader.once(this.key(map, side, at), this.load(map, side, at));
      all.push(...piece.slice(Math.max(start - at, 0), Math.min(stop - at, PIECE)));
    }
    return all;
  }

  /** The map that has the tokens of a side. */
  private place(map: number, side: Side): number {
    return side === "query" && this.read() ? (mapOfRead(this.meta, map) ?? map) : map;
  }

  private key(map: number, side: Side, start: number): string {
    return `tokens ${map} ${side} ${start}`;
  }

  private load(map: number, side: Side, start: number): (signal: AbortSignal) => Promise<string[]> {
    const stop = Math.min(start + PIECE, this.count(map, side));
    return async (signal) => (await this.source.tokens(map, side, start, stop, signal)).map(String);
  }
}
