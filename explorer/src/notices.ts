/** Notices above the views: weights that the page does not contain, and heads that attend to NaN. */

import { type AttentionMap, EXACT, type Meta } from "./types.ts";

/** So many heads are named. */
const MOST_BROKEN = 4;

type Offers = (map: number, head: number, level: number) => boolean;

/** How many heads there are, and of how many the single weights are there. */
export function counted(meta: Meta, offers: Offers): { heads: number; whole: number } {
  let [heads, whole] = [0, 0];
  meta.maps.forEach((map, at) => {
    heads += map.heads;
    for (let head = 0; head < map.heads; head += 1) if (offers(at, head, EXACT)) whole += 1;
  });
  return { heads, whole };
}

/** "exact weights of 12 of 144 heads are in this page, of the others cells of ...", or "" where nothing is left out. */
export function partWords(meta: Meta, offers: Offers): string {
  const { heads, whole } = counted(meta, offers);
  if (whole === heads) return "";
  const finest = meta.maps.map((map, at) => (offers(at, 0, EXACT) ? undefined : finestCell(map, (level) => offers(at, 0, level))));
  const sizes = [...new Set(finest.filter((cell) => cell !== undefined))];
  const cells = sizes.length ? `cells of ${sizes.slice(0, 3).join(", ")} weights and more` : "cells of many weights";
  const exact = meta.exact ?? "exact weights";
  const but = meta.around ? " but around what it opens with" : "";
  const held = whole
    ? `${capital(exact)} of ${whole} of ${heads} heads are in this page, of the others ${cells}${but && ", and single weights around what it opens with"}`
    : `No single weights are in this page${but}: of all ${heads} heads it has ${cells}`;
  return `${held}${meta.all ? `; ${meta.all}` : ""}.`;
}

/** "2 of 12 heads have queries that attend to NaN ...", or "" where none has. */
export function brokenWords(meta: Meta, names: readonly string[]): string {
  const found: string[] = [];
  let heads = 0;
  meta.maps.forEach((map, at) => {
    heads += map.heads;
    map.broken?.forEach((count, head) => {
      if (count) found.push(`${names[at]} head ${head} (${count} of ${map.queries})`);
    });
  });
  if (!found.length) return "";
  const more = found.length > MOST_BROKEN ? `, and ${found.length - MOST_BROKEN} more` : "";
  const have = found.length === 1 ? "1 of" : `${found.length} of`;
  return (
    `NaN: in ${have} ${heads} heads there are queries that attend to NaN or infinity, so that their weights are not ` +
    `numbers; they are drawn in checks. Queries by head: ${found.slice(0, MOST_BROKEN).join(", ")}${more}.`
  );
}

/** "8 × 8", the smallest cells of a map that are there. */
export function finestCell(map: AttentionMap, offers: (level: number) => boolean): string | undefined {
  const level = map.levels.findIndex((_, at) => offers(at));
  return level < 0 ? undefined : map.cells[level].join(" × ");
}

function capital(words: string): string {
  return words.charAt(0).toUpperCase() + words.slice(1);
}
