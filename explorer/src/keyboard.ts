/** What each key does, apart from those that a view has for itself. */

import { SCALES } from "./colour.ts";
import { mapsOf, neighbour } from "./hypotheses.ts";
import { NOTHING } from "./kept.ts";
import { METHODS } from "./links.ts";
import type { Panel } from "./panel.ts";
import { ofHypothesis, pinned, showsOneHead, type State, type View } from "./state.ts";
import type { Meta } from "./types.ts";
import { shown } from "./views/measures.ts";
import { hasWords } from "./words.ts";

/** The change of the state that a key asks for. */
export function keyChange(key: string, state: State, meta: Meta): Partial<State> | undefined {
  const views: Record<string, View> = { h: "head", l: "lines", v: "text", c: "compare", t: "table", Escape: "grid" };
  if (Object.hasOwn(views, key)) return { view: views[key] };
  if (key === "Backspace" || key === "Delete") return { at: NOTHING };
  if (key === "s") return { scale: after(SCALES, state.scale) };
  if (key === "i") return shown(state, state.measure === "weight" ? "contribution" : "weight");
  if (key === "r") return { reduce: state.reduce === "max" ? "mean" : "max" };
  if (key === "n") return { normalise: !state.normalise };
  if (key === "x") return { clip: !state.clip };
  if (key === "u") return { sight: !state.sight };
  if (key === "a") return { alignment: after(["", ...METHODS], state.alignment) };
  if (key === "o") return { gold: !state.gold };
  if (key === "w" && (hasWords(meta) || state.words)) return { words: !state.words };
  if (key === "[" || key === "]")
    return ofHypothesis(state, meta, neighbour(meta, state.hypothesis, key === "]" ? 1 : -1));
  if (key === "d") return { difference: !state.difference };
  if (key === "m" && showsOneHead(state)) return { mean: after(["", "layer", "all"], state.mean) };
  if (key === "p") return { pins: pinned(state.pins, [state.map, state.head]) };
  if (!showsOneHead(state)) return undefined;
  const { heads } = meta.maps[state.map];
  if (key === "ArrowRight" || key === "k") return { head: (state.head + 1) % heads, mean: "" };
  if (key === "ArrowLeft" || key === "j") return { head: (state.head + heads - 1) % heads, mean: "" };
  const step = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
  if (!step) return undefined;
  const maps = mapsOf(meta, state.hypothesis);
  const map = maps[Math.min(Math.max(maps.indexOf(state.map) + step, 0), maps.length - 1)];
  return { map, head: Math.min(state.head, meta.maps[map].heads - 1) };
}

function after<T>(choices: readonly T[], now: T): T {
  return choices[(choices.indexOf(now) + 1) % choices.length];
}

/** Whether a key has moved or zoomed a map. */
export function moves(panel: Panel, { key, shiftKey }: KeyboardEvent): boolean {
  if (key === "+" || key === "=") panel.zoom(2);
  else if (key === "-" || key === "_") panel.zoom(0.5);
  else if (key === "0") panel.fit();
  else if (shiftKey && key === "ArrowLeft") panel.panBy(-0.25, 0);
  else if (shiftKey && key === "ArrowRight") panel.panBy(0.25, 0);
  else if (shiftKey && key === "ArrowUp") panel.panBy(0, -0.25);
  else if (shiftKey && key === "ArrowDown") panel.panBy(0, 0.25);
  else return false;
  return true;
}

/** Whether a key press belongs to a control, not to the explorer. */
export function isTyping(event: KeyboardEvent): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) return true;
  const target = event.target as HTMLElement;
  return /^(input|select|textarea)$/i.test(target.tagName) || target.closest("dialog") !== null;
}
