/** The list of atlases that a server or a notebook offers. */

import { whole } from "../text.ts";
import type { ListedEffects } from "./http_effects.ts";

export interface Listed {
  atlases: { number: number; name: string }[];
  /** How many bytes a text may have that a model is run on; 0 where none can be run. */
  rerun: number;
  /** The model whose heads can be switched off; null where there is none. */
  effects?: ListedEffects | null;
}

/** An atlas of the list. */
export type ListedAtlas = Listed["atlases"][number];

/**
 * What a page shows of a list: all atlases of records; of a model that reads texts the one of a text, else the newest,
 * and behind it the one that this page showed before, whatever other pages had the model read.
 */
export function shownOf({ atlases, rerun }: Listed, text: string, before?: ListedAtlas): ListedAtlas[] {
  if (!rerun) return atlases;
  const now = atlases.find(({ name }) => name === text) ?? atlases[0];
  const others = atlases.filter((other) => other !== now);
  const earlier = before ? others.filter(({ number }) => number === before.number) : others.slice(0, 1);
  return [now, ...earlier];
}

/** Says before it is sent that a text is too long. */
export function checkLength(text: string, most: number): void {
  const bytes = new TextEncoder().encode(text).length;
  if (bytes > most) throw new Error(`the text has ${whole(bytes)} bytes; at most ${whole(most)} are read`);
}
