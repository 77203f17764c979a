/** Badges of a head's roles, with rule, score and n in their tooltips. */

import { make } from "./dom.ts";
import { figure, plain, whole } from "./text.ts";
import type { Role } from "./types.ts";

const SHORT: Record<string, string> = {
  "previous token": "prev",
  "next token": "next",
  "fixed offset": "offset",
  duplicate: "dup",
  "duplicate token": "dup",
  induction: "ind",
  delimiter: "delim",
  diffuse: "diff",
  "rare word": "rare",
};

export function roleWords(role: Role): string {
  const rule = plain(String(role.rule), 300);
  return `${plain(role.name)}: score ${figure(role.score)}, n = ${whole(role.n)}. Rule: ${rule}`;
}

/** The name of a role in at most a few letters, where it has a short form. */
export function shortRole(role: Role): string {
  return SHORT[role.name] ?? plain(role.name);
}

export function badge(role: Role, short: boolean): HTMLSpanElement {
  const text = short ? shortRole(role) : `${plain(role.name)} ${figure(role.score)}`;
  return make("span", { class: "badge", set: { title: roleWords(role) } }, text);
}
