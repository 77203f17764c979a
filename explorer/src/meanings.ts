/** What metrics, marks and files are, in words: the same in tables, tooltips and the help. */

import { CONTRIBUTION_MEANING } from "./contributions.ts";
import { EFFECT_MEANINGS } from "./effects/effect_words.ts";

export const METRIC_MEANINGS: Readonly<Record<string, string>> = {
  entropy: "mean entropy of the rows, −Σ w ln w, in nats: 0 where each query looks at one key",
  effective_keys: "mean of exp(entropy) of the rows: over how many keys equal weights would be spread",
  top1: "mean of the greatest weight of each row",
  sink: "mean weight on the first key that any query attends to",
  distance: "mean of |query − key| in tokens, by weight",
  local: "mean weight on keys at most 8 tokens away",
  self: "mean weight of a token on itself",
  previous: "mean weight on the token before",
  next: "mean weight on the token behind",
  AER_argmax: "alignment error rate of the greatest weight of each row, against links that people made: 0 is best",
};

/** What heads are ranked by of what is kept, and what maps show. */
export const KEPT_MEANINGS: readonly [name: string, words: string][] = [
  ["weight α", "what the query gives to the key; the weights of a row sum to 1"],
  ["contribution", CONTRIBUTION_MEANING.replace(/^contribution /, "")],
  ["change", "weight of what is kept, less that of another atlas; of a row alone half the sum of all differences"],
  ["effect", `what switching the head off does. Encoder: ${EFFECT_MEANINGS.encoder}. Language model: ${EFFECT_MEANINGS["language model"]}. Translator: ${EFFECT_MEANINGS.translator}`],
];

export const ROWS_OF_METRICS = "Means are over the queries that attend to some key.";

export const MARKS: readonly [sign: string, words: string][] = [
  ["hatched", "no pair: the mask forbids it, or the cell lies outside"],
  ["checks", "NaN: the query attends to NaN or infinity, and its weights are not numbers"],
  ["cross, frame", "what is kept: a pair as a cross, tokens as the frames of their rows and columns"],
  ["shade of a token", "the weight between it and what is kept, as the square root of its part of the greatest"],
  ["# behind a value", "the rank of the head by what is kept, 1 the greatest"],
  ["prev, sink, …", "the role of a head: its rule, score and number of rows stand beside its map"],
  ["◆", "pinned for comparison"],
  ["● ✕ ○", "links of an alignment: as gold has it, or of a head without gold; wrong; of no word"],
  ["▢ ⬚ or ━ ┅", "links that people made: sure, possible"],
];

export const FILES: readonly [kind: string, words: string][] = [
  ["PNG, SVG", "the picture of the view; of the heads all of them, also those out of sight"],
  ["CSV", "weights in sight, a line for each query, of a text for each token; in the table all metrics"],
  ["NPZ", "weights in sight with numbers and tokens, for NumPy"],
];

/** What a map shows, for who sees one for the first time. */
export const FIRST_LINE =
  "Each picture is a head: a row for each query, a column for each key, bright where the weight is great. " +
  "Press one to open it; ? explains all numbers and marks.";

/** A metric with its definition, for a tooltip; only its name where it is of somebody else. */
export function metricTitle(name: string): string | undefined {
  return Object.hasOwn(METRIC_MEANINGS, name) ? METRIC_MEANINGS[name] : undefined;
}
