/** The state of the live page of steps, as it stands in the address, and the changes of a what-if. */

import type { StepRequest } from "./answers.ts";

export type Language = "en" | "ko";

export interface PageState {
  language: Language;
  request: StepRequest;
  /** Whether numbers are covered until a class has predicted them. */
  predict: boolean;
  /** The size of the type, an index of SIZES. */
  size: number;
  theme: "" | "light" | "dark";
  /** Whether the page stands in a frame of another one, which has language and theme: its controls are fewer. */
  framed: boolean;
}

/** Sizes of the type in pixels. */
export const SIZES = [14, 16, 18, 21, 25, 30, 36];

export const REQUEST: StepRequest = {
  mechanism: "",
  sentence: "",
  word: 1,
  kind: "cross",
  layer: null,
  head: 0,
  source_word: 1,
  changes: [],
};

export function encodeState(state: PageState, size: number): string {
  const { request } = state;
  const pairs = new URLSearchParams({ lang: state.language, mechanism: request.mechanism });
  for (const name of ["sentence", "word", "kind", "layer", "head", "source_word"] as const) {
    const value = request[name];
    if (value !== REQUEST[name]) pairs.set(name, value === null ? "all" : String(value));
  }
  for (const change of request.changes) pairs.append("change", change);
  if (state.predict) pairs.set("predict", "1");
  if (state.size !== size) pairs.set("size", String(state.size));
  if (state.theme) pairs.set("theme", state.theme);
  if (state.framed) pairs.set("frame", "1");
  return pairs.toString();
}

/** What an address says; what it does not say, or not in a way that is read, is as by default. */
export function decodeState(hash: string, size: number): PageState {
  const pairs = new URLSearchParams(hash.replace(/^#/, ""));
  const whole = (name: string, otherwise: number) => {
    const text = pairs.get(name) ?? "";
    return /^\d{1,4}$/.test(text) ? Number(text) : otherwise;
  };
  const place = (name: "layer" | "head") =>
    pairs.get(name) === "all" ? null : /^\d{1,4}$/.test(pairs.get(name) ?? "") ? whole(name, 0) : REQUEST[name];
  const theme = pairs.get("theme");
  return {
    language: pairs.get("lang") === "ko" ? "ko" : "en",
    request: {
      mechanism: pairs.get("mechanism") ?? "",
      sentence: pairs.get("sentence") ?? "",
      word: Math.max(1, whole("word", 1)),
      kind: pairs.get("kind") ?? REQUEST.kind,
      layer: place("layer"),
      head: place("head"),
      source_word: Math.max(1, whole("source_word", 1)),
      changes: pairs.getAll("change"),
    },
    predict: pairs.get("predict") === "1",
    size: Math.min(whole("size", size), SIZES.length - 1),
    theme: theme === "light" || theme === "dark" ? theme : "",
    framed: pairs.get("frame") === "1",
  };
}

/** A what-if: another score, no 1/√d, keys whose mask is reversed or that no query sees, numbers added to scores. */
export interface Changes {
  score: string;
  unscaled: boolean;
  flipped: Set<number>;
  dropped: Set<number>;
  added: Map<number, number>;
}

/** Reads changes in the grammar of --what-if; those that it cannot show are left out. */
export function readChanges(changes: string[]): Changes {
  const read: Changes = { score: "", unscaled: false, flipped: new Set(), dropped: new Set(), added: new Map() };
  for (const change of changes) {
    const [, name, value] = /^(\w+)=(.*)$/.exec(change) ?? [];
    if (name === "score") read.score = value;
    else if (name === "scale") read.unscaled = Number(value) === 1;
    else if (name === "flip") read.flipped.add(Number(value));
    else if (name === "drop") read.dropped.add(Number(value));
    else if (name === "add") {
      const [key, number] = value.split(":").map(Number);
      read.added.set(key, number);
    }
  }
  return read;
}

export function writeChanges({ score, unscaled, flipped, dropped, added }: Changes): string[] {
  const keys = (numbers: Iterable<number>) => [...numbers].sort((a, b) => a - b);
  return [
    ...(score ? [`score=${score}`] : []),
    ...(unscaled ? ["scale=1"] : []),
    ...keys(flipped).map((key) => `flip=${key}`),
    ...keys(dropped).map((key) => `drop=${key}`),
    ...keys(added.keys())
      .filter((key) => added.get(key) !== 0)
      .map((key) => `add=${key}:${added.get(key)}`),
  ];
}
