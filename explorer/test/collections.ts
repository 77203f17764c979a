/** Several synthetic atlases under one address, and a model that reads other texts. */

import { withNorms } from "./measures.ts";
import { short, type SyntheticAtlas } from "./synthetic.ts";

export interface Named {
  name: string;
  atlas: SyntheticAtlas;
}

export const MOST_BYTES = 2000;

/** Steps of a training: other heads do the same work in each; the last one has read two other words, or more. */
export function steps(count: number): Named[] {
  return Array.from({ length: count }, (_, step) => {
    const words = "it was late and she had not seen the end of it .".split(" ");
    if (step === count - 1) words.splice(3, 2, "but", "he");
    return { name: `step ${100 * step}`, atlas: reading(words, step) };
  });
}

/** What a model of two layers attends to in a text. */
export function read(text: string): Named {
  return { name: text, atlas: reading(text.trim().split(/\s+/), 0) };
}

function reading(words: string[], turn: number): SyntheticAtlas {
  const atlas = short(2, 4, words.length);
  const maps = atlas.maps.map((map) => ({
    ...map,
    token: (_: unknown, index: number) => words[index],
    weight: (head: number, row: number, column: number) => map.weight((head + turn) % 4, row, column),
    pooled: (head: number, ...rest: [number, "max" | "mean"]) => map.pooled((head + turn) % 4, ...rest),
  }));
  return withNorms({ meta: { ...atlas.meta, title: words.join(" ") }, maps });
}
