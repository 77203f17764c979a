/** What each key does, apart from those that a view has for itself. */

import { SCALES } from "./colour.ts";
import { pinned, type State, type View } from "./state.ts";
import type { Meta } from "./types.ts";

/** The change of the state that a key asks for. */
export function keyChange(key: string, state: State, meta: Meta): Partial<State> | undefined {
  const views: Record<string, View> = { h: "head", l: "lines", c: "compare", t: "table", Escape: "grid" };
  if (Object.hasOwn(views, key)) return { view: views[key] };
  if (key === "s") return { scale: SCALES[(SCALES.indexOf(state.scale) + 1) % SCALES.length] };
  if (key === "r") return { reduce: state.reduce === "max" ? "mean" : "max" };
  if (key === "n") return { normalise: !state.normalise };
  if (key === "x") return { clip: !state.clip };
  if (key === "a") return { alignment: !state.alignment };
  if (key === "d") return { difference: !state.difference };
  if (key === "p") return { pins: pinned(state.pins, [state.map, state.head]) };
  if (state.view !== "head" && state.view !== "lines") return undefined;
  const { heads } = meta.maps[state.map];
  if (key === "ArrowRight") return { head: (state.head + 1) % heads };
  if (key === "ArrowLeft") return { head: (state.head + heads - 1) % heads };
  const step = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
  if (!step) return undefined;
  const map = Math.min(Math.max(state.map + step, 0), meta.maps.length - 1);
  return { map, head: Math.min(state.head, meta.maps[map].heads - 1) };
}

/** Whether a key press belongs to a control, not to the explorer. */
export function isTyping(event: KeyboardEvent): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) return true;
  const target = event.target as HTMLElement;
  return /^(input|select|textarea)$/i.test(target.tagName) || target.closest("dialog") !== null;
}
