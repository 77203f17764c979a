/** Types of maps and metadata, and the interface of a data source. */

import type { EffectService } from "./effects/effect_types.ts";
import type { Kept } from "./kept.ts";

export type Reduce = "max" | "mean";
export type Side = "query" | "key";

/** One role of one head, with the evidence for it. */
export interface Role {
  name: string;
  score: number;
  n: number;
  rule: string;
}

/** One of the n best translations of a sentence; ranks count from 0, the best. */
export interface Hypothesis {
  rank: number;
  text: string;
  score: number;
}

/** Links that people made, (source word, target word); what is sure is not repeated among the possible ones. */
export interface Gold {
  sure: [number, number][];
  possible: [number, number][];
}

/** One attention module × call × sequence of the batch. */
export interface AttentionMap {
  name: string;
  call: number;
  sequence: number;
  kind: "self" | "cross";
  /** What the weights are of; absent for softmax attention. */
  operator?: string;
  heads: number;
  queries: number;
  keys: number;
  /** (rows, columns) of each pooled level, the finest first. */
  levels: [number, number][];
  /** (query rows, key columns) in one cell of each pooled level. */
  cells: [number, number][];
  metrics: Record<string, (number | null)[]>;
  roles: Role[][];
  /** How many queries of each head attend to NaN; absent where none of any head does. */
  broken?: number[];
  hypothesis?: Hypothesis;
  /** Of queries and keys the number of each token's word, below 0 for none; null where each is a word. */
  words?: [query: readonly number[] | null, key: readonly number[] | null];
  /** The numbers of the texts that queries and keys are of: equal numbers, equal tokens. */
  texts?: [query: number, key: number];
  /** Whether there are norms of what the keys' values are after the output projection. */
  norms?: boolean;
  gold?: Gold;
}

export interface Meta {
  version: number;
  title: string;
  maps: AttentionMap[];
  /** Names that `profile` answers, of "entropy", "received" and "largest"; the first two where absent. */
  profiles?: string[];
  /** Where all weights are served, in words; for a page that holds only a part of them. */
  all?: string;
  /** What the numbers are, where they are no weights. */
  quantity?: "contribution";
  /** Whether a page has single weights around what it opens with, of heads whose weights it has not all. */
  around?: boolean;
  /** What single weights are called; "exact weights" where absent, else such as "weights to within 0.4 %". */
  exact?: string;
  /** The lists of numbers that a source's own meta data names by their places here, in the `words` of maps. */
  words?: number[][];
  /** Whether `overview` may be asked; many thumbnails then take one request. */
  overview?: boolean;
}

/** The level of single weights, beside the pooled levels 0, 1, 2, ... */
export const EXACT = -1;

/** The side of a tile of exact weights. */
export const TILE = 256;

/**
 * Where maps, tokens and weights come from. Arrays are row-major; NaN where a pair does not exist, and infinity where a
 * weight is not a number because its query attends to NaN.
 */
export interface Source {
  meta(): Promise<Meta>;
  tokens(map: number, side: Side, start: number, stop: number, signal?: AbortSignal): Promise<string[]>;
  pooled(map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array>;
  weights(map: number, head: number, region: Region, signal?: AbortSignal): Promise<Float32Array>;
  profile(map: number, head: number, which: string, signal?: AbortSignal): Promise<Float32Array>;
  /** The coarsest level of all heads of a map: (heads, rows, columns). */
  overview?(map: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array>;
  /**
   * Whether it can give this level (or EXACT), or of it the weights of a region; a source without the method gives all.
   */
  offers?(map: number, head: number, level: number, region?: Region): boolean;
  /** The greatest weights of a row or a column; as Python's `top_values`. */
  top?(map: number, head: number, asked: TopQuery, signal?: AbortSignal): Promise<TopList>;
  /** Of each key of a head, ‖v W‖: what its value is after the output projection. */
  norms?(map: number, head: number, signal?: AbortSignal): Promise<Float32Array>;
  /** As `pooled`, of contributions. */
  pooledContributions?(map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array>;
  /** For each head of a map the mean over the kept queries of the sum over the kept keys; as Python's `rank_heads`. */
  kept?(map: number, kept: Kept, by: Measure, signal?: AbortSignal): Promise<Float32Array>;
  /** How much each head that reads the same tokens has more of what is kept than in another source. */
  changes?(other: Source, map: number, kept: Kept, signal?: AbortSignal): Promise<HeadValue[]>;
  /** Whether `changes` can be asked of it. */
  compares?(other: Source): boolean;
}

/** Of a query the greatest keys, of a key the greatest queries, in order by weight or contribution. */
export interface TopQuery {
  side: Side;
  index: number;
  count: number;
  by: Measure;
}

/** The greatest first; `rest`: the sum of the other weights. Empty where the row attends to NaN. */
export interface TopList {
  indices: number[];
  weights: number[];
  contributions: number[] | null;
  tokens: string[];
  rest: number;
  broken: boolean;
}

/** What the numbers of a map are. */
export type Measure = "weight" | "contribution";

/** The number of one head; null where it is none. */
export interface HeadValue {
  map: number;
  head: number;
  value: number | null;
}

/** One atlas or several, by their names, such as the steps of a training. */
export interface Collection {
  readonly atlases: readonly { name: string; source: Source }[];
  /**
   * Runs the model on another text, and gives what there is then: the new atlas first, the one before it behind. The
   * name of the first atlas is the text that it shows.
   */
  rerun?(text: string, signal: AbortSignal): Promise<Collection>;
  /** Whether aborting `rerun` ends the run. */
  readonly cancels?: boolean;
  /** The model whose heads can be switched off, where it is here. */
  readonly effects?: EffectService;
  /** Why there is none, where there is a model. */
  readonly noEffects?: string;
}

/** Rows row0 .. row1 - 1 and columns column0 .. column1 - 1. */
export interface Region {
  row0: number;
  row1: number;
  column0: number;
  column1: number;
}

export interface Size {
  width: number;
  height: number;
}

/** The meta data of a source, checked as far as the explorer relies on them. */
export function checkedMeta(value: unknown): Meta {
  const meta = value as Meta;
  if (!meta || typeof meta !== "object" || !Array.isArray(meta.maps))
    throw new Error("the source gave no list of maps");
  for (const map of meta.maps) {
    const counts = [map.heads, map.queries, map.keys];
    if (!counts.every((count) => Number.isInteger(count) && count > 0)) {
      throw new Error(
        `map ${String(map.name)} has heads, queries, keys ${counts.join(", ")}; it needs whole numbers above 0`,
      );
    }
    map.levels ??= [];
    map.cells ??= map.levels.map(([rows, columns]) => [Math.ceil(map.queries / rows), Math.ceil(map.keys / columns)]);
    map.metrics ??= {};
    map.roles ??= [];
    const words = map.words?.map((list) => (typeof list === "number" ? meta.words?.[list] : list));
    const fits = (list: unknown, count: number) => list === null || (Array.isArray(list) && list.length === count);
    if (words && fits(words[0], map.queries) && fits(words[1], map.keys)) map.words = words as AttentionMap["words"];
    else delete map.words;
  }
  return meta;
}
