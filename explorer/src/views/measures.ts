/** The control that says whether weights or contributions are shown, and what these are. */

import type { Context } from "../context.ts";
import { CONTRIBUTION_MEANING, FORMULA } from "../contributions.ts";
import { make, select } from "../dom.ts";
import { KEPT_ORDERS, keptOrder, SIMILAR } from "../ordering.ts";
import type { State } from "../state.ts";
import type { Measure } from "../types.ts";

/** The choice; and where contributions are shown, their definition. */
export function measureControls(context: Context): HTMLElement[] {
  const { measure } = context.state();
  const fault = context.contributionFault();
  const choices = [
    { value: "weight", label: "weight" },
    { value: "contribution", label: fault ? `contribution: ${fault}` : "contribution", disabled: fault !== "" },
  ];
  const control = select("Shows", choices, measure, (value) => context.update(shown(context.state(), value as Measure)), true);
  const box = control.querySelector("select");
  if (box) {
    box.dataset.control = "measure";
    box.title = fault ? `Contributions cannot be shown: ${fault}.` : `${CONTRIBUTION_MEANING} (i)`;
  }
  if (measure === "weight") return [control];
  return [control, make("span", { class: "muted meaning", set: { title: CONTRIBUTION_MEANING } }, `${FORMULA}, the length of what the key adds to the output`)];
}

/** Heads that are in order by what is shown of what is kept go on to be so. */
export function shown({ order }: State, measure: Measure): Partial<State> {
  const by = keptOrder(order);
  if (by === "weight" || by === "contribution") {
    return { measure, order: order.replace(KEPT_ORDERS[by], KEPT_ORDERS[measure]) };
  }
  // Alike are heads by their weights, whose rows are shares of 1.
  return { measure, order: order === SIMILAR && measure === "contribution" ? "layer" : order };
}
