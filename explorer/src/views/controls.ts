/** The controls of heat maps. */

import { SCALES } from "../colour.ts";
import type { Context } from "../context.ts";
import { button, select, toggle } from "../dom.ts";
import type { Panel } from "../panel.ts";
import { pinned, REDUCES } from "../state.ts";
import type { Reduce } from "../types.ts";

export function heatControls(context: Context, panels: () => Panel[], pin: boolean): HTMLElement[] {
  const state = context.state();
  const parts = [
    ...looks(context),
    toggle(
      "Alignment",
      state.alignment,
      () => context.update({ alignment: !context.state().alignment }),
      "mark the greatest weight of each row (a)",
    ),
  ];
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

/** How weights become colours: for heat maps and thumbnails. */
export function looks(context: Context): HTMLElement[] {
  const state = context.state();
  const names = { linear: "linear", sqrt: "square root", log: "logarithm" };
  const scales = SCALES.map((value) => ({ value, label: names[value] }));
  const reduces = REDUCES.map((value) => ({ value, label: value }));
  return [
    select("Scale", scales, state.scale, (scale) => context.update({ scale: scale as (typeof SCALES)[number] })),
    select("Pooled by", reduces, state.reduce, (reduce) => context.update({ reduce: reduce as Reduce })),
    toggle(
      "Row maximum",
      state.normalise,
      () => context.update({ normalise: !context.state().normalise }),
      "divide each row by its greatest weight (n)",
    ),
    toggle(
      "Clip 1 %",
      state.clip,
      () => context.update({ clip: !context.state().clip }),
      "the last colour for the greatest hundredth of the cells, so that the others can be told apart (x)",
    ),
  ];
}
