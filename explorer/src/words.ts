/** A source that merges the tokens of each word: queries by their mean, keys by their sum. */

import { wordCount, type Weights, wordWeights } from "./links.ts";
import { type Kept, MOST_KEPT as MOST_TOKENS } from "./kept.ts";
import { type AttentionMap, EXACT, type Meta, type Reduce, type Region, type Side, type Source, TILE } from "./types.ts";
import { weightsIn } from "./region_weights.ts";
import { cutOf, pooledTo, profileOfWhole } from "./whole_map.ts";

/** Maps of which all weights are kept at a time. */
const MOST_KEPT = 24;
const COARSEST = 64;

/** The numbers of the words of a map's tokens, each its own where nothing else is known. */
export function wordsOf(map: AttentionMap, side: Side): readonly number[] {
  const [query, key] = map.words ?? [null, null];
  const count = side === "query" ? map.queries : map.keys;
  return (side === "query" ? query : key) ?? Array.from({ length: count }, (_, at) => at);
}

/** Whether any map has words of more than one token, or tokens of no word. */
export function hasWords(meta: Meta): boolean {
  return meta.maps.some((map) => map.words);
}

/** The words of kept tokens, or all tokens of kept words. */
export function otherKept(map: AttentionMap, kept: Kept, toWords: boolean): Kept {
  if (!map.words) return kept;
  const side = (which: Side): number[] => {
    const words = wordsOf(map, which);
    if (toWords) return [...new Set(kept[which].map((token) => words[token] ?? -1).filter((word) => word >= 0))];
    return [...words.keys()].filter((token) => kept[which].includes(words[token])).slice(0, MOST_TOKENS);
  };
  return { query: side("query"), key: side("key") };
}

/** What pieces of a word spell together: their signs for spaces and for parts of words are left out. */
export function spelled(pieces: string[]): string {
  return pieces.map((piece, at) => piece.replace(at ? /^##|[▁Ġ]/g : /^[▁Ġ]+/, "")).join("") || pieces.join("");
}

/** The same source by words; maps without words stay, and so does all else that the source can do. */
export function byWords(source: Source, meta: Meta): { source: Source; meta: Meta } {
  const offers = (map: number, head: number, level: number, region?: Region) =>
    source.offers?.(map, head, level, region) ?? true;
  const merged = new Merged(source, meta, offers);
  const maps = meta.maps.map((map, at) => merged.map(map, at));
  const asked = {
    meta: async () => ({ ...meta, maps }),
    tokens: (map: number, side: Side, start: number, stop: number, signal?: AbortSignal) =>
      merged.has(map) ? merged.tokens(map, side, start, stop) : source.tokens(map, side, start, stop, signal),
    pooled: (map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal) =>
      merged.has(map)
        ? merged.pooled(maps[map], map, head, level, reduce)
        : source.pooled(map, head, level, reduce, signal),
    weights: (map: number, head: number, region: Region, signal?: AbortSignal) =>
      merged.has(map) ? merged.weights(map, head, region) : source.weights(map, head, region, signal),
    profile: (map: number, head: number, which: string, signal?: AbortSignal) =>
      merged.has(map) ? merged.profile(map, head, which) : source.profile(map, head, which, signal),
    offers: (map: number, head: number, level: number, region?: Region) =>
      merged.has(map) ? true : offers(map, head, level, region),
    overview: undefined,
    // These are asked by tokens.
    kept: undefined,
    changes: undefined,
    norms: undefined,
  };
  return { source: Object.assign(Object.create(source) as Source, asked), meta: { ...meta, maps, exact: `${meta.exact ?? "exact weights"} of words`, overview: false } };
}

class Merged {
  private readonly kept = new Map<string, Promise<Weights>>();
  private readonly changed = new Set<number>();

  constructor(
    private readonly source: Source,
    private readonly meta: Meta,
    private readonly offers: (map: number, head: number, level: number) => boolean,
  ) {}

  has(map: number): boolean {
    return this.changed.has(map);
  }

  /** The map between words; as it is where it has none, or where single weights are not there to be added up. */
  map(map: AttentionMap, at: number): AttentionMap {
    const queries = wordCount(wordsOf(map, "query"));
    const keys = wordCount(wordsOf(map, "key"));
    if (!map.words || !queries || !keys || !this.offersAll(map, at)) return map;
    this.changed.add(at);
    let cell = 1;
    while (Math.ceil(Math.max(queries, keys) / cell) > COARSEST) cell *= 2;
    const level: [number, number] = [Math.ceil(queries / cell), Math.ceil(keys / cell)];
    return { ...map, queries, keys, words: undefined, levels: [level], cells: [[cell, cell]] };
  }

  async tokens(at: number, side: Side, start: number, stop: number): Promise<string[]> {
    const map = this.meta.maps[at];
    const numbers = wordsOf(map, side);
    const pieces: string[][] = Array.from({ length: wordCount(numbers) }, () => []);
    const tokens = await this.source.tokens(at, side, 0, side === "query" ? map.queries : map.keys);
    numbers.forEach((word, index) => word >= 0 && pieces[word].push(String(tokens[index])));
    return pieces.slice(start, stop).map(spelled);
  }

  async weights(at: number, head: number, region: Region): Promise<Float32Array> {
    return cutOf(await this.whole(at, head), region);
  }

  async pooled(map: AttentionMap, at: number, head: number, level: number, reduce: Reduce): Promise<Float32Array> {
    return pooledTo(await this.whole(at, head), map.levels[level], map.cells[level], reduce);
  }

  /** Of the merged weights. */
  async profile(at: number, head: number, which: string): Promise<Float32Array> {
    return profileOfWhole(await this.whole(at, head), which);
  }

  private offersAll(map: AttentionMap, at: number): boolean {
    return Array.from({ length: map.heads }, (_, head) => head).every((head) => this.offers(at, head, EXACT));
  }

  private whole(at: number, head: number): Promise<Weights> {
    const key = `${at}/${head}`;
    const kept = this.kept.get(key);
    if (kept) return kept;
    const map = this.meta.maps[at];
    const all = { row0: 0, row1: map.queries, column0: 0, column1: map.keys };
    const asked = weightsIn(all, TILE, (piece) => this.source.weights(at, head, piece)).then((data) =>
      wordWeights(
        { rows: map.queries, columns: map.keys, data },
        wordsOf(map, "query"),
        wordsOf(map, "key"),
      ),
    );
    this.kept.set(key, asked);
    asked.catch(() => this.kept.delete(key));
    for (const old of this.kept.keys()) {
      if (this.kept.size <= MOST_KEPT) break;
      this.kept.delete(old);
    }
    return asked;
  }
}
