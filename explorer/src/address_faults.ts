/** What an address names that is not here. */

import { isNothing, readKept } from "./kept.ts";
import { decode, DEFAULT, encode, MOST_READ, MOST_TEXT, type State } from "./state.ts";
import type { Meta } from "./types.ts";

const MOST_TOLD = 6;
const LONGEST = 40;

/** The parts of an address that name nothing: of no name, with a value that cannot be read, or of what is not there. */
export function addressFaults(hash: string, meta: Meta, atlases: number): string[] {
  const pairs = hash.replace(/^#/, "").split("&").filter(Boolean);
  return pairs.filter((pair) => isUnknown(pair) || isAbsent(pair, decode(hash), meta, atlases));
}

/** The faults as a sentence; "" without any. */
export function faultWords(faults: readonly string[]): string {
  if (!faults.length) return "";
  const named = faults.slice(0, MOST_TOLD).map((pair) => (pair.length > LONGEST ? `${pair.slice(0, LONGEST)}…` : pair));
  const more = faults.length > named.length ? `, and ${faults.length - named.length} more` : "";
  return `The address has ${named.join(", ")}${more}: there is no such thing here, and the rest of it is shown.`;
}

function isUnknown(pair: string): boolean {
  const cut = pair.indexOf("=");
  const name = pair.slice(0, cut);
  if (cut < 0 || !Object.hasOwn(DEFAULT, name)) return true;
  let value: string;
  try {
    value = decodeURIComponent(pair.slice(cut + 1));
  } catch {
    return true;
  }
  const standard = DEFAULT[name as keyof State];
  if (typeof standard === "boolean") return value !== "0" && value !== "1";
  // A value that was read is written again; one that is as by default is not, and needs to be that.
  if (encode(decode(pair))) return false;
  if (name === "at" || name === "pins" || name === "frame" || name === "against") return value !== "" && !isEmptyKept(name, value);
  if (name === "text") return value.length > MOST_READ;
  if (typeof standard === "number") return value === "" || Number(value) !== standard;
  if (Array.isArray(standard)) return value !== standard.join(",");
  return value !== standard && value.length <= MOST_TEXT;
}

const isEmptyKept = (name: string, value: string): boolean => {
  const kept = name === "at" ? readKept(value) : undefined;
  return kept !== undefined && isNothing(kept);
};

function isAbsent(pair: string, state: State, meta: Meta, atlases: number): boolean {
  const name = pair.slice(0, pair.indexOf("="));
  const map = meta.maps[state.map];
  if (name === "map") return !map;
  if (name === "atlas" || name === "against") return (state[name] ?? 0) >= atlases;
  if (name === "pins") return state.pins.some(([at, head]) => !(head < (meta.maps[at]?.heads ?? 0)));
  if (!map) return false;
  if (name === "head") return state.head >= map.heads;
  return name === "at" && (state.at.query.some((row) => row >= map.queries) || state.at.key.some((column) => column >= map.keys));
}
