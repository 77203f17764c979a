/** The view state, and its encoding as a permalink. */

import { COLOUR_MAPS, type ColourMap, SCALES, type Scale } from "./colour.ts";
import { counterpart, hypothesesOf } from "./hypotheses.ts";
import { type Kept, keptText, keptWithin, NOTHING, readKept } from "./kept.ts";
import { METHODS, type Method } from "./links.ts";
import { canAverage, type Mean, MEANS } from "./means.ts";
import type { Measure, Meta, Reduce, Side } from "./types.ts";
import type { Frame } from "./viewport.ts";

export const VIEWS = ["grid", "head", "lines", "text", "compare", "table"] as const;
export const THEMES = ["auto", "light", "dark"] as const;
/** What a row of a translation is called: the token that is said there, or the one that was read before it. */
export const ROWS = ["said", "read"] as const;
export const MEASURES: readonly Measure[] = ["weight", "contribution"];
export const REDUCES: readonly Reduce[] = ["max", "mean"];
export const MOST_PINS = 6;
export const MOST_TEXT = 200;
/** A longer text that a model read is not kept in a permalink, since addresses have an end. */
export const MOST_READ = 2000;

export type View = (typeof VIEWS)[number];
export type Theme = (typeof THEMES)[number];
export type Pin = [map: number, head: number];

export interface State {
  view: View;
  map: number;
  head: number;
  /** Which heads are averaged in place of the one: of the layer, all of the kind, the pinned ones; "" for none. */
  mean: Mean;
  rows: (typeof ROWS)[number];
  /** undefined: the whole map. */
  frame?: Frame;
  /** What is kept, in every view: tokens or a pair of them. */
  at: Kept;
  /** What the colours and lines stand for. */
  measure: Measure;
  scale: Scale;
  reduce: Reduce;
  normalise: boolean;
  clip: boolean;
  /** Whether the colours of a part of a map go up to the greatest weight in sight, not to that of the whole map. */
  sight: boolean;
  colours: ColourMap;
  theme: Theme;
  /** How weights become links; "" where none are marked. */
  alignment: Method | "";
  /** The least weight of a link of the method "threshold". */
  least: number;
  /** Whether links that people made are shown, where there are any. */
  gold: boolean;
  /** Whether the tokens of a word are one row and one column. */
  words: boolean;
  /** The rank of the translation that is shown, of several. */
  hypothesis: number;
  /** Whether all translations are listed. */
  listed: boolean;
  /** Which atlas is shown, of several; and with which it is compared. */
  atlas: number;
  against?: number;
  /** The text that the model read, where it can be run on another; "" where it cannot, or where the text is long. */
  text: string;
  pins: Pin[];
  difference: boolean;
  /** "layer", or a metric or role to sort by, with a minus before it for the greatest first. */
  order: string;
  role: string;
  /** A condition on a metric: "entropy>1.5". */
  metric: string;
  find: string;
  threshold: number;
  top: number;
  direction: Side;
  /** Whether sinks and special tokens are left out of a shaded text. */
  hide: boolean;
  /** First query and first key of lines and text. */
  window: [number, number];
}

export const DEFAULT: State = {
  view: "grid",
  map: 0,
  head: 0,
  mean: "",
  rows: "said",
  frame: undefined,
  at: NOTHING,
  measure: "weight",
  scale: "sqrt",
  reduce: "max",
  normalise: false,
  clip: true,
  sight: true,
  colours: "viridis",
  theme: "auto",
  alignment: "",
  least: 0.2,
  gold: true,
  words: false,
  hypothesis: 0,
  listed: false,
  atlas: 0,
  against: undefined,
  text: "",
  pins: [],
  difference: false,
  order: "layer",
  role: "",
  metric: "",
  find: "",
  threshold: 0.05,
  top: 3,
  direction: "query",
  hide: false,
  window: [0, 0],
};

/** The text after # of a permalink: only what is not as by default. */
export function encode(state: State): string {
  const pairs: string[] = [];
  const put = (name: string, value: string) => pairs.push(`${name}=${encodeURIComponent(value).replace(/%2C/g, ",")}`);
  for (const name of Object.keys(DEFAULT) as (keyof State)[]) {
    const text = written(name, state);
    if (text !== written(name, DEFAULT)) put(name, text);
  }
  return pairs.join("&");
}

function written(name: keyof State, state: State): string {
  const value = state[name];
  if (value === undefined) return "";
  if (name === "frame") {
    const frame = state.frame as Frame;
    return [frame.row, frame.column, frame.span].map((number) => Number(number.toPrecision(8))).join(",");
  }
  if (name === "at") return keptText(state.at);
  if (name === "pins") return state.pins.map(([map, head]) => `${map}.${head}`).join(",");
  if (typeof value === "boolean") return value ? "1" : "0";
  return Array.isArray(value) ? value.join(",") : String(value);
}

/** The state that a permalink tells; what cannot be read is as by default. */
export function decode(hash: string): State {
  const state: State = { ...DEFAULT, pins: [] };
  for (const pair of hash.replace(/^#/, "").split("&")) {
    const cut = pair.indexOf("=");
    if (cut < 0) continue;
    try {
      read(state, pair.slice(0, cut), decodeURIComponent(pair.slice(cut + 1)));
    } catch {
      // A broken escape: that part is left as by default.
    }
  }
  return state;
}

function read(state: State, name: string, text: string): void {
  const numbers = text.split(",").map(Number);
  const finite = text !== "" && numbers.every(Number.isFinite);
  const natural = finite && numbers.every((number) => Number.isInteger(number) && number >= 0);
  const one = <T extends string>(choices: readonly T[], otherwise: T): T =>
    choices.includes(text as T) ? (text as T) : otherwise;
  if (name === "view") state.view = one(VIEWS, DEFAULT.view);
  else if (name === "mean") state.mean = one(MEANS, "");
  else if (name === "rows") state.rows = one(ROWS, DEFAULT.rows);
  else if (name === "measure") state.measure = one(MEASURES, DEFAULT.measure);
  else if (name === "scale") state.scale = one(SCALES, DEFAULT.scale);
  else if (name === "reduce") state.reduce = one(REDUCES, DEFAULT.reduce);
  else if (name === "colours") state.colours = one(COLOUR_MAPS, DEFAULT.colours);
  else if (name === "theme") state.theme = one(THEMES, DEFAULT.theme);
  else if (name === "direction") state.direction = one(["query", "key"], DEFAULT.direction);
  else if (name === "alignment") state.alignment = one(METHODS, "");
  else if (isSwitch(name)) state[name] = text === "1";
  else if (name === "order" || name === "role" || name === "metric" || name === "find")
    state[name] = text.slice(0, MOST_TEXT);
  else if (name === "text") state.text = text.length <= MOST_READ ? text : "";
  else if (isCount(name) && natural) state[name] = numbers[0];
  else if ((name === "threshold" || name === "least") && finite) state[name] = Math.min(Math.max(numbers[0], 0), 1);
  else if (name === "at") state.at = readKept(text) ?? NOTHING;
  else if (name === "window" && natural && numbers.length === 2) state.window = [numbers[0], numbers[1]];
  else if (name === "frame" && finite && numbers.length === 3 && numbers[2] > 0) {
    state.frame = { row: numbers[0], column: numbers[1], span: numbers[2] };
  } else if (name === "pins") state.pins = pins(text);
}

const SWITCHES = ["normalise", "clip", "sight", "difference", "gold", "words", "listed", "hide"] as const;
const COUNTS = ["map", "head", "top", "hypothesis", "atlas", "against"] as const;

const isSwitch = (name: string): name is (typeof SWITCHES)[number] => (SWITCHES as readonly string[]).includes(name);
const isCount = (name: string): name is (typeof COUNTS)[number] => (COUNTS as readonly string[]).includes(name);

function pins(text: string): Pin[] {
  const found = text.split(",").map((pin) => pin.split(".").map(Number));
  const good = found.filter(
    (pin) => pin.length === 2 && pin.every((number) => Number.isInteger(number) && number >= 0),
  );
  return good.slice(0, MOST_PINS) as Pin[];
}

/** The state with maps, heads and cells that the source does have. */
export function within(state: State, meta: Meta): State {
  const map = Math.min(state.map, meta.maps.length - 1);
  const chosen = meta.maps[map];
  const exists = ([at, head]: Pin) => at < meta.maps.length && head < meta.maps[at].heads;
  return {
    ...state,
    map,
    head: Math.min(state.head, chosen.heads - 1),
    // A map that is of a translation says which is shown.
    hypothesis: chosen.hypothesis?.rank ?? rankIn(state.hypothesis, meta),
    at: keptWithin(state.at, chosen),
    pins: state.pins.filter(exists),
  };
}

function rankIn(rank: number, meta: Meta): number {
  const all = hypothesesOf(meta);
  return all.some((hypothesis) => hypothesis.rank === rank) ? rank : (all[0]?.rank ?? 0);
}

/** What a source opens with unless an address tells more: a translation with the mean of its cross-attention. */
export function openingState(meta: Meta): State {
  const map = meta.maps.findIndex(({ kind }) => kind === "cross");
  return map < 0 ? DEFAULT : { ...DEFAULT, view: "head", map, mean: canAverage(meta.maps[map]) ? "all" : "" };
}

/** The same map, or its counterpart, of another translation. */
export function ofHypothesis(state: State, meta: Meta, rank: number): Partial<State> {
  return { hypothesis: rank, map: counterpart(meta, state.map, rank) };
}

/** Pinned if it was not, else no longer; the oldest pin goes when there are too many. */
export function pinned(pins: Pin[], pin: Pin): Pin[] {
  const others = pins.filter(([map, head]) => map !== pin[0] || head !== pin[1]);
  return others.length < pins.length ? others : [...others, pin].slice(-MOST_PINS);
}

/** Whether the chosen head is what is shown, and arrow keys lead to others. */
export function showsOneHead({ view, against }: State): boolean {
  return view === "head" || view === "lines" || view === "text" || (view === "compare" && against !== undefined);
}

/** Whether going from one state to another is worth an entry in the browser's history. */
export function isStep(from: State, to: State): boolean {
  return from.view !== to.view || from.map !== to.map || from.head !== to.head ||
    from.text !== to.text || from.hypothesis !== to.hypothesis || from.pins.length !== to.pins.length;
}
