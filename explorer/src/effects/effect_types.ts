/** What is asked of a model whose heads are switched off, and what it answers; as the server has both. */

/** What is compared: of an encoder a state, of a language model the next token, of a translator what it says. */
export type ModelKind = "encoder" | "language model" | "translator";

export const REPLACEMENTS = ["zero", "mask", "mean", "before"] as const;
export type Replacement = (typeof REPLACEMENTS)[number];

/** What is switched off: null for all there are. */
export interface Terms {
  module: string | null;
  heads: readonly number[] | null;
  queries: readonly number[] | null;
  keys: readonly number[] | null;
}

export interface EffectRequest {
  text: string;
  /** Whose state, or next token, is compared; null for the last. */
  token: number | null;
  /** null: each head, one by one. */
  terms: Terms | null;
  replace: Replacement;
  /** The text of a mean, and of what is put in from another run. */
  reference: string | null;
}

export interface EffectCost {
  interventions: number;
  seconds: number;
  tokens: number;
}

/** A word or token with its probability. */
export type Likely = readonly [token: string, probability: number];

/** What a model does: a language model has `next`, a translator `text` and `score`. */
export interface Outcome {
  next?: readonly Likely[];
  probability?: number;
  text?: string;
  score?: number;
  changed?: boolean;
}

/** Between the tokens of the other text and of this one. */
export interface Alignment {
  pairs: readonly (readonly [before: number, now: number])[];
  missing_before: readonly number[];
  missing_now: readonly number[];
  /** Of those that are missing. */
  tokens: { before: readonly string[]; now: readonly string[] };
}

/** The first line: how many effects are to come, and what the model does without them. */
export interface Before {
  before: Outcome;
  of: number;
  alignment: Alignment | null;
}

/** One effect. */
export interface Effect {
  done: number;
  module: string | null;
  head: number | null;
  value: number | null;
  /** Of a state: how far it moves, as a part of its length. */
  distance?: number | null;
  after: Outcome;
}

export type EffectLine = Before | Effect | { ranked: unknown } | { error: string };

/** A model whose heads can be switched off. */
export interface EffectService {
  readonly kind: ModelKind;
  /** Its attention modules by the names of the maps, with their heads. */
  readonly modules: readonly { name: string; heads: number }[];
  /** How long it will take, by one run of it. */
  cost(request: EffectRequest, signal: AbortSignal): Promise<EffectCost>;
  /** The answer line by line, as soon as each is there. */
  measure(request: EffectRequest, signal: AbortSignal): AsyncIterable<EffectLine>;
}
