/** Tokens as running text: where spaces and new lines stand between them, by the signs that tokenizers use. */

import { visible } from "./text.ts";

export interface Piece {
  text: string;
  /** What stands before it. */
  before: "" | " " | "\n";
}

/** Longer pieces are cut: a token may be of megabytes. */
const LONGEST = 200;
const CLOSES = /^[.,;:!?%)\]}’”»…。、，．！？」』）]/u;

type Spaced = (token: string, at: number) => Piece["before"];

export function runningText(tokens: readonly string[]): Piece[] {
  const spaced = spacing(tokens);
  return tokens.map((token, at) => {
    const line = /^(Ċ|\r?\n|<0x0A>)+$/.test(token);
    const bare = line ? "↵" : visible(token.replace(/^##(?=.)|^[▁Ġ ]+(?=.)/gu, ""), LONGEST);
    const broken = at > 0 && /(Ċ|\n|<0x0A>)$/.test(tokens[at - 1]);
    return { text: bare, before: at === 0 ? "" : broken ? "\n" : line ? "" : spaced(token, at) };
  });
}

/** The tokens of a text have one convention, which is told by any of them. */
function spacing(tokens: readonly string[]): Spaced {
  const some = (pattern: RegExp) => tokens.some((token) => pattern.test(token));
  if (some(/^[▁Ġ]/u)) return (token) => (/^[▁Ġ]/u.test(token) || isSpecial(token) ? " " : "");
  if (some(/^ ./u)) return (token) => (token.startsWith(" ") || isSpecial(token) ? " " : "");
  const letters = tokens.filter((token) => [...token].length <= 1).length;
  if (tokens.length > 4 && letters > 0.9 * tokens.length) return () => "";
  return (token) => (token.startsWith("##") || CLOSES.test(token) ? "" : " ");
}

/** Whether a token stands for no text, such as [CLS], </s> and <|endoftext|>. */
export function isSpecial(token: string): boolean {
  return /^(\[[A-Za-z][A-Za-z0-9_ ]*\]|<\/?[A-Za-z][A-Za-z0-9_]*>|<\|[^|<>]*\|>|<｜[^<>]*｜>)$/u.test(token);
}
