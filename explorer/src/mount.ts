/** An explorer put into an element, or the words why there is none. */

import { among, metasOf, ofText } from "./atlases.ts";
import { make, replace } from "./dom.ts";
import { Explorer, type Options } from "./explorer.ts";
import { decode, type State } from "./state.ts";
import type { Shelf, Source } from "./types.ts";

/** Shows one atlas or several inside an element; `start` is as after # of a permalink, or what `decode` gave. */
export async function mount(
  element: Element,
  given: Source | Shelf | Promise<Shelf>,
  start: string | State = "",
  options: Options = {},
): Promise<Explorer> {
  const from = typeof start === "string" ? decode(start) : start;
  try {
    const ready = await given;
    const shelf = "atlases" in ready ? ready : { atlases: [{ name: "", source: ready }] };
    if (!shelf.atlases.length) throw new Error("there is no atlas");
    const state = among(ofText(from, shelf), shelf.atlases.length);
    const metas = await metasOf(shelf, state);
    if (metas.shown.maps.length === 0) throw new Error("there is no attention map in it");
    return new Explorer(element, shelf, metas, state, options);
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    replace(element, make("p", { class: "regard-failure", set: { role: "alert" } }, `Nothing to show: ${words}`));
    throw error;
  }
}
