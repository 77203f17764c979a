/** Which heads are shown, and in which order. */

import { belongs } from "./hypotheses.ts";
import type { State } from "./state.ts";
import type { AttentionMap, Meta, Role } from "./types.ts";

/** The order in which heads that are alike stand together; it needs their weights, and is made by the grid. */
export const SIMILAR = "similar";

export interface Head {
  map: number;
  head: number;
}

/** The names of all metrics, and of all roles, that any map has. */
export function metricNames(meta: Meta): string[] {
  return [...new Set(meta.maps.flatMap((map) => Object.keys(map.metrics)))];
}

export function roleNames(meta: Meta): string[] {
  const names = meta.maps.flatMap((map) => map.roles.flatMap((roles) => (roles ?? []).map((role) => role.name)));
  return [...new Set(names)].sort();
}

export function rolesOf(map: AttentionMap, head: number): Role[] {
  return map.roles[head] ?? [];
}

/** Before the name of a role in an order, since a metric may have the same name. */
const ROLE = "role:";

/** How an order calls a role. */
export function roleOrder(name: string): string {
  return ROLE + name;
}

/** An order for people: "entropy", "score of sink". */
export function orderWords(name: string): string {
  const kept = keptOrder(name);
  if (kept) return KEPT_WORDS[kept];
  return name.startsWith(ROLE) ? `score of ${name.slice(ROLE.length)}` : name.replace(/_/g, " ");
}

/** A metric, or the score of a role by its name or as `roleOrder` has it; NaN where a head has none. */
export function valueOf(map: AttentionMap, head: number, name: string): number {
  if (name.startsWith(ROLE)) return scoreOf(map, head, name.slice(ROLE.length));
  if (Object.hasOwn(map.metrics, name)) return map.metrics[name][head] ?? NaN;
  return scoreOf(map, head, name);
}

function scoreOf(map: AttentionMap, head: number, name: string): number {
  return rolesOf(map, head).find((role) => role.name === name)?.score ?? NaN;
}

/** What heads are ranked by of what is kept. */
export type KeptOrder = "weight" | "contribution" | "change" | "effect";

/** The orders by what is kept, by their names in addresses. */
export const KEPT_ORDERS: Readonly<Record<KeptOrder, string>> = {
  weight: "kept:weight",
  contribution: "kept:contribution",
  change: "kept:change",
  effect: "kept:effect",
};

const KEPT_WORDS: Readonly<Record<KeptOrder, string>> = {
  weight: "weight of what is kept",
  contribution: "contribution of what is kept",
  change: "change of what is kept",
  effect: "effect of switching off",
};

/** By what of what is kept an order is; undefined for any other order. */
export function keptOrder(order: string): KeptOrder | undefined {
  const name = order.replace(/^-/, "");
  return (Object.keys(KEPT_ORDERS) as KeptOrder[]).find((by) => KEPT_ORDERS[by] === name);
}

export interface Condition {
  metric: string;
  above: boolean;
  bound: number;
}

/** "entropy > 1.5" or "entropy<1.5"; undefined where it is neither. */
export function condition(text: string): Condition | undefined {
  const found = /^\s*([\w. -]+?)\s*([<>])=?\s*(-?[\d.]+(?:e-?\d+)?)\s*$/i.exec(text);
  return found ? { metric: found[1], above: found[2] === ">", bound: Number(found[3]) } : undefined;
}

type Choice = Pick<State, "order" | "role" | "metric" | "find" | "hypothesis">;

/** The heads of a choice in its order; `kept` gives the value of a head for an order by what is kept. */
export function heads(meta: Meta, names: string[], state: Choice, kept: (head: Head) => number = () => NaN): Head[] {
  const wanted = condition(state.metric);
  const find = state.find.trim().toLowerCase();
  const found: Head[] = [];
  meta.maps.forEach((map, at) => {
    if (!belongs(map, state.hypothesis)) return;
    if (find && !`${map.name} ${names[at]}`.toLowerCase().includes(find)) return;
    for (let head = 0; head < map.heads; head += 1) {
      if (state.role && !rolesOf(map, head).some((role) => role.name === state.role)) continue;
      if (wanted && !holds(valueOf(map, head, wanted.metric), wanted)) continue;
      found.push({ map: at, head });
    }
  });
  return sorted(found, meta, state.order, kept);
}

function holds(value: number, { above, bound }: Condition): boolean {
  return above ? value >= bound : value <= bound;
}

function sorted(found: Head[], meta: Meta, order: string, kept: (head: Head) => number): Head[] {
  if (order === "layer" || order === SIMILAR) return found;
  const falling = order.startsWith("-");
  const name = falling ? order.slice(1) : order;
  const value = (at: Head) => (keptOrder(order) ? kept(at) : valueOf(meta.maps[at.map], at.head, name));
  // Heads without a value come last, whichever the direction.
  return found
    .map((head) => ({ head, value: value(head) }))
    .sort(
      (a, b) =>
        Number(Number.isNaN(a.value)) - Number(Number.isNaN(b.value)) ||
        (falling ? b.value - a.value : a.value - b.value) ||
        0,
    )
    .map(({ head }) => head);
}
