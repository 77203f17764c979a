/** Where kept tokens are in another text: a text that was edited has them by its words. */

import type { Context } from "./context.ts";
import { isNothing, type Kept, SIDES } from "./kept.ts";
import type { Side } from "./types.ts";

/** Tokens of longer texts are not compared: they stay where they were. */
const MOST_COMPARED = 100_000;

/** Both sides of a map as tokens. */
export type Texts = Record<Side, readonly string[] | undefined>;

/** What is needed to find kept tokens again; nothing is asked where none are kept. */
export async function textsOf(context: Context, map: number, kept: Kept): Promise<Texts> {
  const side = async (which: Side) => {
    const count = context.tokens.count(map, which);
    return kept[which].length && count <= MOST_COMPARED ? context.tokens.range(map, which, 0, count) : undefined;
  };
  if (isNothing(kept)) return { query: undefined, key: undefined };
  const [query, key] = await Promise.all(SIDES.map(side));
  return { query, key };
}

/** The kept tokens of one text in another. */
export function keptByWords(kept: Kept, before: Texts, after: Texts): Kept {
  const side = (which: Side): number[] => {
    const [old, now] = [before[which], after[which]];
    if (!old || !now) return [];
    return kept[which].flatMap((index) => sameWord(old, now, index) ?? []);
  };
  return { query: side("query"), key: side("key") };
}

/**
 * Where the token of a text is in an edited one. What both begin with and what both end with stays; in between it is the
 * same token, as the n-th of its kind where it is the n-th, else the last of its kind; undefined where there is none.
 */
export function sameWord(before: readonly string[], after: readonly string[], index: number): number | undefined {
  const shortest = Math.min(before.length, after.length);
  let start = 0;
  while (start < shortest && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < shortest - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end += 1;
  if (index < start) return index;
  if (index >= before.length - end) return index + after.length - before.length;
  const places = (text: readonly string[]) =>
    Array.from({ length: text.length - end - start }, (_, at) => at + start).filter((at) => text[at] === before[index]);
  const [own, found] = [places(before), places(after)];
  if (found.length) return found[Math.min(own.indexOf(index), found.length - 1)];
  // The word may have moved out of what was edited.
  const elsewhere = after.lastIndexOf(before[index]);
  return elsewhere < 0 ? undefined : elsewhere;
}
