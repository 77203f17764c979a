/** The controls that say which head is shown, or the mean of which, and what the rows of a translation are called. */

import type { Context } from "../context.ts";
import { select } from "../dom.ts";
import { canAverage, type Mean, MEANS } from "../means.ts";
import { ROWS, type State } from "../state.ts";
import { mapOfRead } from "../tokens.ts";

export function headControls(context: Context): HTMLElement[] {
  return [meanControl(context), rowsControl(context)].filter((part) => part !== undefined);
}

/** One head, or the mean of several. */
function meanControl(context: Context): HTMLElement | undefined {
  const { mean, map, pins, view } = context.state();
  if (!canAverage(context.meta.maps[map])) return undefined;
  const words: Record<Mean, string> = {
    "": "one",
    layer: "mean of layer",
    all: "mean of all layers",
    pins: `mean of ${pins.length} pinned`,
    each: "pinned, in colours",
  };
  const several = (value: Mean) => pins.length > 1 && (value === "pins" || view === "lines");
  const choices = MEANS.filter((value) => value === mean || (value !== "pins" && value !== "each") || several(value));
  const options = choices.map((value) => ({ value, label: words[value] }));
  const control = select("Heads", options, mean, (chosen) => context.update({ mean: chosen as Mean }));
  control.title = "one head, or the mean of the weights of several (m)";
  return control;
}

/** What the rows of a translation are called. */
function rowsControl(context: Context): HTMLElement | undefined {
  const { rows, map } = context.state();
  if (mapOfRead(context.meta, map) === undefined) return undefined;
  const choices = ROWS.map((value) => ({ value, label: value }));
  const control = select("Rows", choices, rows, (value) => context.update({ rows: value as State["rows"] }));
  control.title = "a row by the token that is said there, or by the one that the decoder has read before it";
  return control;
}
