/** The notice about tokens of no word, such as [CLS] and [SEP], which a map between words leaves out. */

import { make } from "./dom.ts";
import { visible, whole } from "./text.ts";
import type { AttentionMap, Side, Source } from "./types.ts";

const MOST_NAMED = 4;

/** The positions of the tokens of no word on one side of a map. */
export function tokensOfNoWord(map: AttentionMap, side: Side): number[] {
  const numbers = map.words?.[side === "query" ? 0 : 1];
  return numbers ? [...numbers.keys()].filter((at) => numbers[at] < 0) : [];
}

/** "Words leaves out 2 of 12 keys, tokens of no word: [CLS], [SEP]. ..."; "" where none is left out. */
export async function leftOutWords(source: Source, map: AttentionMap, at: number): Promise<string> {
  const parts = await Promise.all(
    (["query", "key"] as const).map(async (side) => {
      const left = tokensOfNoWord(map, side);
      if (!left.length) return "";
      const [count, name] = side === "query" ? [map.queries, "queries"] : [map.keys, "keys"];
      const first = left.slice(0, MOST_NAMED);
      const tokens = await Promise.all(first.map((index) => source.tokens(at, side, index, index + 1)));
      const named = [...new Set(tokens.map(([token]) => visible(token, 16)))].join(", ");
      return `${whole(left.length)} of ${whole(count)} ${name} (${named}${left.length > first.length ? ", …" : ""})`;
    }),
  );
  const told = parts.filter(Boolean).join(" and ");
  return told && `Words leaves out tokens of no word: ${told}. Rows then add up to less than 100 %.`;
}

export class LeftOut {
  readonly element = make("p", { class: "left-out", set: { role: "status", hidden: true } });
  private asked = "";

  /** `source` and `map` are those of tokens; `words`: whether the map is shown by words. */
  update(source: Source, map: AttentionMap, at: number, words: boolean): void {
    const asked = words ? `${at}` : "";
    if (asked === this.asked) return;
    this.asked = asked;
    this.say("");
    if (words) void leftOutWords(source, map, at).then((told) => asked === this.asked && this.say(told), () => undefined);
  }

  private say(words: string): void {
    this.element.textContent = words;
    this.element.hidden = !words;
  }
}
