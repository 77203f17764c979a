/** Labels of several atlases, and mapping a view state from one atlas to another. */

import { NOTHING } from "./kept.ts";
import type { Pin, State } from "./state.ts";
import { plain } from "./text.ts";
import type { Meta, Collection } from "./types.ts";

const LONGEST = 40;

/** What to call each atlas: short, and different from all others. */
export function labels(names: readonly string[]): string[] {
  const all = names.map((name) => plain(name.trim() || "atlas", LONGEST));
  return all.map((label, at) => (all.indexOf(label) === all.lastIndexOf(label) ? label : `${label} (${at + 1})`));
}

/** The map of another atlas that is the same module, call, sequence and translation; else the one in the same place. */
export function sameMap(from: Meta, map: number, to: Meta): number {
  const wanted = from.maps[map];
  const found = to.maps.findIndex(
    ({ name, call, sequence, hypothesis }) =>
      name === wanted.name &&
      call === wanted.call &&
      sequence === wanted.sequence &&
      hypothesis?.rank === wanted.hypothesis?.rank,
  );
  return found < 0 ? Math.min(map, to.maps.length - 1) : found;
}

/** The same head of another atlas. */
export function sameHead(from: Meta, [map, head]: Pin, to: Meta): Pin {
  const at = sameMap(from, map, to);
  return [at, Math.min(head, to.maps[at].heads - 1)];
}

/** A state of one atlas for another: map, head and pins are the same ones; the place in them only if it can be. */
export function carried(state: State, from: Meta, to: Meta): State {
  const [map, head] = sameHead(from, [state.map, state.head], to);
  const pins = new Map(state.pins.map((pin) => sameHead(from, pin, to)).map((pin) => [String(pin), pin]));
  const place = { frame: state.frame, at: state.at, window: state.window };
  const fits = sameSizes(from, state.map, to, map);
  const nowhere: typeof place = { frame: undefined, at: NOTHING, window: [0, 0] };
  return { ...state, map, head, pins: [...pins.values()], ...(fits ? place : nowhere) };
}

function sameSizes(from: Meta, a: number, to: Meta, b: number): boolean {
  return from.maps[a].queries === to.maps[b].queries && from.maps[a].keys === to.maps[b].keys;
}

/** Which atlas is compared with unless another is chosen: the one before it in the list, of the first the second. */
export function neighbour(count: number, atlas: number): number | undefined {
  return count < 2 ? undefined : atlas > 0 ? atlas - 1 : 1;
}

/** The chosen head beside the same one of another atlas, and what it has more; without one, that ends. */
export function compared(against: number | undefined): Partial<State> {
  return against === undefined ? { against } : { against, view: "compare", difference: true };
}

/** The change that a key asks for: another atlas, or the one before beside this one. */
export function atlasKey(key: string, { atlas }: State, count: number): Partial<State> | undefined {
  if (count < 2) return undefined;
  if (key === ",") return { atlas: Math.max(atlas - 1, 0) };
  if (key === ".") return { atlas: Math.min(atlas + 1, count - 1) };
  return key === "b" ? compared(neighbour(count, atlas)) : undefined;
}

/** The state with atlases that are there. */
export function among(state: State, count: number): State {
  const atlas = Math.min(state.atlas, count - 1);
  return { ...state, atlas, against: state.against !== undefined && state.against < count ? state.against : undefined };
}

/** The state with the atlas of its text, where a model can be run on texts: the newest where none is of that text. */
export function ofText(state: State, collection: Collection): State {
  if (!collection.rerun || !state.text) return state;
  const atlas = Math.max(collection.atlases.findIndex(({ name }) => name === state.text), 0);
  const against = state.against === undefined || collection.atlases.length < 2 ? undefined : atlas === 0 ? 1 : 0;
  return { ...state, atlas, against };
}

/** What there is in the atlas that is shown, and in the one that it is compared with. */
export interface Metas {
  shown: Meta;
  other?: Meta;
}

export async function metasOf(collection: Collection, { atlas, against }: Pick<State, "atlas" | "against">): Promise<Metas> {
  const asked = [atlas, ...(against === undefined ? [] : [against])].map((at) => collection.atlases[at].source.meta());
  const [shown, other] = await Promise.all(asked);
  return { shown, other };
}
