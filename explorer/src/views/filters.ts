/** The controls over the grid and the table: order, role, metric, name. */

import type { Context } from "../context.ts";
import { make, select } from "../dom.ts";
import { metricTitle } from "../meanings.ts";
import { condition, KEPT_ORDERS, metricNames, orderWords, roleNames, roleOrder, SIMILAR } from "../ordering.ts";
import { keptOrders } from "../kept_values.ts";
import { MOST_TEXT } from "../state.ts";

/** `similar`: whether heads that are alike can be put together. */
export function filters(context: Context, similar = false): HTMLElement[] {
  const { meta } = context;
  const state = context.state();
  const metrics = metricNames(meta);
  const roles = roleNames(meta);
  const orders = [{ value: "layer", label: "layer" }];
  if (similar && state.measure === "weight") orders.push({ value: SIMILAR, label: "similar heads together" });
  const kept = keptOrders(context).map((by) => KEPT_ORDERS[by]);
  for (const order of [...kept, ...metrics, ...roles.map(roleOrder)]) {
    const words = order === KEPT_ORDERS.change ? ["most changed heads", "least changed heads"] : ["greatest", "least"].map((most) => `${orderWords(order)}, ${most}`);
    orders.push({ value: `-${order}`, label: `${words[0]} first` }, { value: order, label: `${words[1]} first` });
  }
  const order = select("Order", orders, state.order, (chosen) => context.update({ order: chosen }));
  const box = order.querySelector("select");
  if (box) box.dataset.control = "order";
  order.title = metrics.map((name) => `${orderWords(name)}: ${metricTitle(name) ?? ""}`).join("\n");
  const parts: HTMLElement[] = [order];
  if (roles.length) {
    const choices = [{ value: "", label: "any" }, ...roles.map((name) => ({ value: name, label: name }))];
    parts.push(select("Role", choices, state.role, (role) => context.update({ role })));
  }
  if (metrics.length) parts.push(metricBox(context, metrics));
  parts.push(nameBox(context));
  return parts;
}

/** Shows an order that was chosen elsewhere. */
export function showOrder(bar: Element, order: string): void {
  const box = bar.querySelector<HTMLSelectElement>("select[data-control=order]");
  if (box && box.value !== order) box.value = order;
}

function metricBox(context: Context, metrics: string[]): HTMLElement {
  const input = make("input", {
    class: "short",
    set: {
      type: "text",
      placeholder: `${metrics[0]} > 1`,
      spellcheck: "false",
      title: `One condition, such as ${metrics[0]} > 1. Metrics: ${metrics.join(", ")}`,
    },
    on: {
      input: () => {
        const good = input.value.trim() === "" || condition(input.value) !== undefined;
        input.setAttribute("aria-invalid", String(!good));
        if (good) context.update({ metric: input.value.trim().slice(0, MOST_TEXT) });
      },
    },
  });
  input.value = context.state().metric;
  return make("label", { class: "field" }, make("span", {}, "Metric"), input);
}

function nameBox(context: Context): HTMLElement {
  const input = make("input", {
    class: "short",
    set: { type: "search", placeholder: "layer name", spellcheck: "false" },
    on: { input: () => context.update({ find: input.value.slice(0, MOST_TEXT) }) },
  });
  input.value = context.state().find;
  return make("label", { class: "field" }, make("span", {}, "Find"), input);
}
