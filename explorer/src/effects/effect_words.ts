/** What a model did with heads switched off, in words and small tables. */

import { make } from "../dom.ts";
import { figure, plain, visible, whole } from "../text.ts";
import type { Alignment, Effect, EffectCost, Likely, ModelKind, Outcome, Replacement } from "./effect_types.ts";

export const REPLACEMENT_WORDS: Record<Replacement, string> = {
  zero: "zero",
  mask: "the mask: other keys share its weight",
  mean: "its mean over a text",
  before: "the same of another text",
};

/** What the number of an effect is. */
export const EFFECT_MEANINGS: Record<ModelKind, string> = {
  encoder: "1 − cos between the state before and after: 0 where it does not move",
  "language model": "change of the logit of the token that was predicted, less the mean of all logits",
  translator: "change of the log-probability of what it said before",
};

export function costWords({ interventions, seconds }: EffectCost): string {
  const runs = interventions === 1 ? "1 run of the model" : `${whole(interventions)} runs of the model`;
  return `Costs ${runs}, about ${durationWords(seconds)}.`;
}

export function durationWords(seconds: number): string {
  if (seconds < 0.095) return `${Math.max(0.01, Number(seconds.toFixed(2)))} s`;
  if (seconds < 9.5) return `${seconds.toFixed(1)} s`;
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

/** With its sign, but for an encoder, whose states move by a distance. */
export function signed(value: number | null, kind: ModelKind): string {
  if (value === null) return "NaN";
  if (kind === "encoder") return figure(value);
  return value < 0 ? `−${figure(-value)}` : `+${figure(value)}`;
}

/** One effect in a sentence. */
export function effectSentence(kind: ModelKind, compared: string, before: Outcome, { value, distance, after }: Effect): string {
  if (kind === "encoder") {
    const part = distance === null || distance === undefined ? "" : `, ${figure(distance)} of its length`;
    return `${capital(compared)} moves by ${signed(value, kind)} (1 − cos)${part}.`;
  }
  if (kind === "language model") {
    const [token] = before.next?.[0] ?? [""];
    return `The logit of “${visible(token)}” changes by ${signed(value, kind)}.`;
  }
  const stays = after.changed ? "The translation changes." : "The translation stays the same.";
  return `${stays} The log-probability of what it said before changes by ${signed(value, kind)}.`;
}

/** The output before and after, side by side; none for an encoder, whose states are no text. */
export function outcomeTable(kind: ModelKind, before: Outcome, after: Outcome): HTMLElement | undefined {
  if (kind === "encoder") return undefined;
  if (kind === "translator") {
    const line = (name: string, words: Node[], score: number | undefined) =>
      make("tr", {}, make("th", { set: { scope: "row" } }, name), make("td", {}, ...words), make("td", { class: "figure" }, figure(score)));
    return table(
      ["", "translation", "score"],
      line("before", [document.createTextNode(plain(before.text ?? "", 400))], before.score),
      line("after", changedWords(before.text ?? "", after.text ?? ""), after.score),
    );
  }
  const rows = Math.max(before.next?.length ?? 0, after.next?.length ?? 0);
  const cells = (likely: Likely | undefined) => [
    make("td", {}, likely ? visible(likely[0]) : ""),
    make("td", { class: "figure" }, likely ? figure(likely[1]) : ""),
  ];
  const lines = Array.from({ length: rows }, (_, at) =>
    make("tr", {}, make("th", { set: { scope: "row" } }, String(at + 1)), ...cells(before.next?.[at]), ...cells(after.next?.[at])),
  );
  return table(["", "next token before", "probability", "after", "probability"], ...lines);
}

function table(names: string[], ...lines: HTMLElement[]): HTMLElement {
  const head = make("tr", {}, ...names.map((name) => (name ? make("th", { set: { scope: "col" } }, name) : make("td"))));
  return make("table", { class: "outcome" }, make("thead", {}, head), make("tbody", {}, ...lines));
}

/** Longer texts are not compared word by word. */
const MOST_COMPARED = 400;

/** The words of a text, with those marked that the one before has not in their place. */
function changedWords(before: string, after: string): Node[] {
  const [old, now] = [before.split(" "), after.split(" ")];
  const kept = old.length * now.length <= MOST_COMPARED ** 2 ? common(old, now) : new Set(now.keys());
  return now.flatMap((word, at) => {
    const words = plain(word, 80);
    return [document.createTextNode(at ? " " : ""), kept.has(at) ? document.createTextNode(words) : make("mark", {}, words)];
  });
}

/** The places in `now` of a longest common subsequence. */
function common(old: string[], now: string[]): Set<number> {
  const length = Array.from({ length: old.length + 1 }, () => new Uint16Array(now.length + 1));
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      length[i][j] = old[i] === now[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const found = new Set<number>();
  for (let [i, j] = [0, 0]; i < old.length && j < now.length; ) {
    if (old[i] === now[j]) {
      found.add(j);
      i += 1;
      j += 1;
    } else if (length[i + 1][j] >= length[i][j + 1]) i += 1;
    else j += 1;
  }
  return found;
}

const MOST_NAMED = 6;

/** Which tokens a patch has between two texts, and which of them it leaves as they are. */
export function alignmentWords({ pairs, missing_before, missing_now, tokens }: Alignment): string {
  const list = (indices: readonly number[], words: readonly string[]) => {
    const named = indices.slice(0, MOST_NAMED).map((index, at) => `${whole(index)} “${visible(words[at] ?? "", 24)}”`);
    return named.join(", ") + (indices.length > MOST_NAMED ? `, and ${whole(indices.length - MOST_NAMED)} more` : "");
  };
  const parts = [`${whole(pairs.length)} ${pairs.length === 1 ? "token" : "tokens"} of the two texts aligned`];
  if (missing_now.length) parts.push(`left as they are, since the other text does not have them: ${list(missing_now, tokens.now)}`);
  if (missing_before.length) parts.push(`not put in, since this text does not have them: ${list(missing_before, tokens.before)} of the other text`);
  return `${parts.join("; ")}.`;
}

const capital = (words: string): string => words.charAt(0).toUpperCase() + words.slice(1);
