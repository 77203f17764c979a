/** Roles as small labels that tell their rule, their score and their n. */

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

export function badge(role: Role, short: boolean): HTMLSpanElement {
  const name = plain(role.name);
  const text = short ? (SHORT[role.name] ?? name) : `${name} ${figure(role.score)}`;
  return make("span", { class: "badge", set: { title: roleWords(role) } }, text);
}
