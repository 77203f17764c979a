/** The controls of heat maps. */

import { SCALES } from "../colour.ts";
import type { Context } from "../context.ts";
import { button, select, slider, toggle } from "../dom.ts";
import { type Method, METHODS } from "../links.ts";
import type { Panel } from "../panel.ts";
import { pinned, REDUCES } from "../state.ts";
import type { Reduce } from "../types.ts";
import { hasWords } from "../words.ts";
import { measureControls } from "./measures.ts";

export function heatControls(context: Context, panels: () => Panel[], pin: boolean): HTMLElement[] {
  const state = context.state();
  const parts = [
    ...looks(context),
    ...linkControls(context),
    wordToggle(context),
  ].filter((part) => part !== undefined);
  const zoom = [
    button("−", () => panels()[0]?.zoom(0.5), {
      class: "square",
      set: { "aria-label": "zoom out", title: "zoom out (−)" },
    }),
    button("+", () => panels()[0]?.zoom(2), {
      class: "square",
      set: { "aria-label": "zoom in", title: "zoom in (+)" },
    }),
    button("Fit", () => panels()[0]?.fit(), { set: { title: "the whole map (0)" } }),
  ];
  if (!pin) return [...parts, ...zoom];
  const isPinned = state.pins.some(([map, head]) => map === state.map && head === state.head);
  const press = () => {
    const now = context.state();
    context.update({ pins: pinned(now.pins, [now.map, now.head]) });
  };
  return [...parts, ...zoom, toggle(isPinned ? "◆ Pinned" : "◇ Pin", isPinned, press, "keep for comparison (p)")];
}

const METHOD_WORDS: Record<Method, string> = {
  argmax: "argmax",
  mutual: "mutual",
  "grow-diag": "grow-diag",
  threshold: "above a weight",
};

/** How weights become links, and the least weight where that is asked for. */
export function linkControls(context: Context): HTMLElement[] {
  const state = context.state();
  const choices = [{ value: "", label: "none" }, ...METHODS.map((value) => ({ value, label: METHOD_WORDS[value] }))];
  const method = select("Alignment", choices, state.alignment, (alignment) =>
    context.update({ alignment: alignment as Method | "" }),
  );
  method.title = "argmax: the greatest weight of each row; mutual: of its column too; grow-diag: and their neighbours (a)";
  if (state.alignment !== "threshold") return [method];
  const range = { min: 0.01, max: 1, step: 0.01, value: state.least };
  return [method, slider("at least", range, (least) => context.update({ least }))];
}

/** Words or their tokens, where it is known which make which. */
export function wordToggle(context: Context): HTMLElement | undefined {
  const { words } = context.state();
  if (!words && !hasWords(context.meta)) return undefined;
  const why = "the tokens of a word as one row, their mean, and one column, their sum (w)";
  const press = toggle("Words", words, () => context.update({ words: !context.state().words }), why);
  press.dataset.control = "words";
  return press;
}

/** Zoomed in, the colours are those of what is seen, unless two places are to be compared. */
function sightToggle(context: Context): HTMLElement {
  const press = () => context.update({ sight: !context.state().sight });
  return toggle("In sight", context.state().sight, press, "zoomed in, the last colour is for the greatest weight in sight, not for that of the whole map (u)");
}

/** How weights become colours: for heat maps and thumbnails. */
export function looks(context: Context): HTMLElement[] {
  const state = context.state();
  const names = { linear: "linear", sqrt: "square root", log: "logarithm" };
  const scales = SCALES.map((value) => ({ value, label: names[value] }));
  const reduces = REDUCES.map((value) => ({ value, label: value }));
  return [
    ...measureControls(context),
    select("Scale", scales, state.scale, (scale) => context.update({ scale: scale as (typeof SCALES)[number] })),
    select("Pooled by", reduces, state.reduce, (reduce) => context.update({ reduce: reduce as Reduce })),
    toggle(
      "Row maximum",
      state.normalise,
      () => context.update({ normalise: !context.state().normalise }),
      `divide each row by its greatest ${state.measure} (n)`,
    ),
    toggle(
      "Clip 1 %",
      state.clip,
      () => context.update({ clip: !context.state().clip }),
      "the last colour for the greatest hundredth of the cells, so that the others can be told apart (x)",
    ),
    ...(state.view === "head" || state.view === "compare" ? [sightToggle(context)] : []),
  ];
}
