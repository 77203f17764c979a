/** The n best translations of a sentence: which maps are of which, and where their texts differ. */

import type { AttentionMap, Hypothesis, Meta } from "./types.ts";

/** All hypotheses that maps are of, by their rank; none in most atlases. */
export function hypothesesOf(meta: Meta): Hypothesis[] {
  const found = new Map<number, Hypothesis>();
  for (const { hypothesis } of meta.maps) if (hypothesis) found.set(hypothesis.rank, hypothesis);
  return [...found.values()].sort((a, b) => a.rank - b.rank);
}

/** Whether a map is shown while a hypothesis is chosen: those of the source belong to all. */
export function belongs(map: AttentionMap, rank: number): boolean {
  return !map.hypothesis || map.hypothesis.rank === rank;
}

/** The places of the maps that are shown while a hypothesis is chosen. */
export function mapsOf(meta: Meta, rank: number): number[] {
  return [...meta.maps.keys()].filter((at) => belongs(meta.maps[at], rank));
}

/** The map of the same module that is of another hypothesis; the map itself where it is of all. */
export function counterpart(meta: Meta, at: number, rank: number): number {
  const { name, kind, hypothesis } = meta.maps[at];
  if (!hypothesis) return at;
  const alike = ({ name: other, kind: of }: AttentionMap) => other === name && of === kind;
  return mapsOf(meta, rank).find((place) => alike(meta.maps[place])) ?? at;
}

/** The rank before or after one that is there, round the ends. */
export function neighbour(meta: Meta, rank: number, step: 1 | -1): number {
  const ranks = hypothesesOf(meta).map((hypothesis) => hypothesis.rank);
  const at = ranks.indexOf(rank);
  return ranks.length ? ranks[(Math.max(at, 0) + step + ranks.length) % ranks.length] : rank;
}

export interface Part {
  words: string;
  kind: "same" | "new" | "gone";
}

/** More words than these are not compared. */
const MOST_WORDS = 400;

/** A text as parts: what it shares with another, what is new in it, and what of the other is gone. */
export function differences(other: string, text: string): Part[] {
  const [a, b] = [other, text].map((words) => words.split(/\s+/).filter(Boolean));
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return [{ words: text, kind: "same" }];
  const common = commonLengths(a, b);
  const parts: Part[] = [];
  const put = (word: string, kind: Part["kind"]) => {
    const last = parts[parts.length - 1];
    if (last?.kind === kind) last.words += ` ${word}`;
    else parts.push({ words: word, kind });
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      put(b[j], "same");
      [i, j] = [i + 1, j + 1];
    } else if (i < a.length && (j === b.length || common[i + 1][j] >= common[i][j + 1])) {
      put(a[i], "gone");
      i += 1;
    } else {
      put(b[j], "new");
      j += 1;
    }
  }
  return parts;
}

/** How many words the rests from i and from j have in common, in their order. */
function commonLengths(a: string[], b: string[]): number[][] {
  const lengths = Array.from({ length: a.length + 1 }, () => new Array<number>(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  return lengths;
}
