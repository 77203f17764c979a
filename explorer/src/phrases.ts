/** Finds tokens that hold a text, and runs of tokens whose running text does. */

import { runningText } from "./running_text.ts";

/** Tokens first to last; equal where one token holds the text. */
export interface PhraseMatch {
  first: number;
  last: number;
}

/** So many tokens before a piece are read with it, since a phrase may begin there. */
export const MOST_OVERLAP = 64;

/**
 * Matches among some tokens, whose first is number `start`, whatever the case of letters and however many spaces. Of a
 * run that begins among the first `known` tokens, which were searched already, only what ends behind them counts.
 */
export function phraseMatches(tokens: readonly string[], wanted: string, start: number, known = 0): PhraseMatch[] {
  const plain = wanted.toLowerCase();
  const phrase = squeezed(plain.replace(/\s+/g, " ").trim()).text;
  const found = new Map<number, number>();
  const holds = new Set<number>();
  tokens.forEach((token, at) => {
    if (!token.toLowerCase().includes(plain)) return;
    holds.add(at);
    if (at >= known) found.set(at, at);
  });
  if (phrase) {
    const { text, owner } = joined(tokens);
    for (let from = text.indexOf(phrase); from >= 0; from = text.indexOf(phrase, from + 1)) {
      const [first, last] = [owner[from], owner[from + phrase.length - 1]];
      // One token that holds it is found as such.
      if (last >= known && !(first === last && holds.has(first)) && !found.has(first)) found.set(first, last);
    }
  }
  return [...found].sort(([a], [b]) => a - b).map(([first, last]) => ({ first: start + first, last: start + last }));
}

/** The running text in small letters, and for each of its characters the token that it is of. */
function joined(tokens: readonly string[]): { text: string; owner: number[] } {
  let text = "";
  const owner: number[] = [];
  runningText(tokens).forEach(({ text: own, before }, at) => {
    const part = `${before ? " " : ""}${own.replace(/␣/g, " ")}`.toLowerCase();
    text += part;
    for (let i = 0; i < part.length; i += 1) owner.push(at);
  });
  const { text: short, places } = squeezed(text);
  return { text: short, owner: places.map((at) => owner[at]) };
}

/** A text without the spaces beside signs, which tokenizers do not keep, and the places of what is left. */
function squeezed(text: string): { text: string; places: number[] } {
  const isWord = (character: string) => /[\p{L}\p{N}\p{M}]/u.test(character);
  const kept = Array.from({ length: text.length }, (_, at) => at).filter((at) => text[at] !== " " || (isWord(text[at - 1] ?? "") && isWord(text[at + 1] ?? "")));
  return { text: kept.map((at) => text[at]).join(""), places: kept };
}
