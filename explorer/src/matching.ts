/** Links of a head by the chosen alignment method, scored against gold links. */

import { alignment, type Mark } from "./alignment.ts";
import { type Context, headTitle } from "./context.ts";
import { type Field, HeadField } from "./field.ts";
import { goldSets, linked, type Method, type Pair, type Scores, scores, type Weights, wordWeights } from "./links.ts";
import type { Need } from "./loader.ts";
import { weightsOf } from "./region.ts";
import type { State } from "./state.ts";
import { type AttentionMap, EXACT, type Region } from "./types.ts";
import { wordsOf } from "./words.ts";

/** Maps of more rows or columns are not held as a whole. */
export const MOST_LINKED = 512;

/** Where a gold link lies: the tokens of its two words. */
export interface GoldMark extends Region {
  sure: boolean;
}

export interface Matched {
  /** In the rows and columns that are shown. */
  marks: Mark[];
  /** Between words; undefined without gold links or without a method. */
  scores?: Scores;
}

/** Whether links of all methods can be found, and not only the greatest weights of the rows in sight. */
export function isShort(map: AttentionMap): boolean {
  return Math.max(map.queries, map.keys) <= MOST_LINKED;
}

/** The gold links of a map in its rows and columns. */
export function goldMarks(map: AttentionMap): GoldMark[] {
  if (!map.gold) return [];
  const rows = stretches(wordsOf(map, "query"));
  const columns = stretches(wordsOf(map, "key"));
  const marks = (links: Pair[], sure: boolean) =>
    links.flatMap(([source, target]): GoldMark[] => {
      const [row, column] = [rows.get(target), columns.get(source)];
      return row && column ? [{ row0: row[0], row1: row[1], column0: column[0], column1: column[1], sure }] : [];
    });
  return [...marks(map.gold.possible, false), ...marks(map.gold.sure, true)];
}

/** From the first to behind the last token of each word. */
function stretches(words: readonly number[]): Map<number, [number, number]> {
  const found = new Map<number, [number, number]>();
  words.forEach((word, at) => {
    if (word >= 0) found.set(word, [found.get(word)?.[0] ?? at, at + 1]);
  });
  return found;
}

/** Links and scores of weights, which may be of tokens; the gold links are between words. */
export function matched(
  weights: Weights,
  map: AttentionMap,
  method: Method,
  { least, gold }: Pick<State, "least" | "gold">,
): Matched {
  const [queries, keys] = [wordsOf(map, "query"), wordsOf(map, "key")];
  const possible = map.gold && gold ? goldSets(map.gold).possible : undefined;
  const sign = ([column, row]: Pair): Mark["sign"] => {
    if (!possible) return "link";
    if (queries[row] < 0 || keys[column] < 0) return "outside";
    return possible.has([keys[column], queries[row]].join()) ? "right" : "wrong";
  };
  const marks = linked(weights, method, least).map(
    (link): Mark => ({ row: link[1], column: link[0], rows: 1, columns: 1, sign: sign(link) }),
  );
  if (!map.gold) return { marks };
  const between = linked(wordWeights(weights, queries, keys), method, least);
  return { marks, scores: scores(between, map.gold) };
}

/** Finds them for what is shown, and keeps the last. */
export class Matcher {
  private name = "";
  private last?: Matched;

  constructor(private readonly context: Context) {}

  /** The marks of what is shown: by the method, or what is known of the rows in sight. */
  marks(need: Need, field: Field, seen: Region): Mark[] {
    const found = this.look(need, field);
    if (found) return found.marks;
    // Of a difference, and of maps too long to be held, only the greatest weights of the rows in sight are known.
    const known = field instanceof HeadField && isShort(field.map) && field.offers(EXACT);
    return this.context.state().alignment && !known ? alignment(need, field, seen) : [];
  }

  /** Undefined until the weights have come, and where there is no method, no single head, or too long a map. */
  look(need: Need, field: Field): Matched | undefined {
    const state = this.context.state();
    if (!state.alignment || !(field instanceof HeadField) || !isShort(field.map) || !field.offers(EXACT))
      return undefined;
    const { map, mapIndex, head } = field;
    const name = [headTitle(this.context, mapIndex, head), mapIndex, state.alignment, state.least, state.gold].join();
    if (name === this.name) return this.last;
    const data = need(`whole ${mapIndex}/${head}`, () =>
      weightsOf(this.context, field, { row0: 0, row1: map.queries, column0: 0, column1: map.keys }),
    );
    if (!data) return undefined;
    this.name = name;
    // Rows that attend to NaN have no links.
    const finite = data.map((value) => (Number.isFinite(value) ? value : NaN));
    this.last = matched({ rows: map.queries, columns: map.keys, data: finite }, map, state.alignment, state);
    return this.last;
  }
}
