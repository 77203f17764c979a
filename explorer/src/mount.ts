/** An explorer put into an element, or the words why there is none. */

import { among, metasOf } from "./atlases.ts";
import { make, replace } from "./dom.ts";
import { Explorer, type Options } from "./explorer.ts";
import { decode, type State } from "./state.ts";
import type { Shelf, Source } from "./types.ts";

/** Shows one atlas or several inside an element; `state` is as after # of a permalink, or what `decode` gave. */
export async function mount(
  element: Element,
  given: Source | Shelf | Promise<Shelf>,
  state: string | State = "",
  options: Options = {},
): Promise<Explorer> {
  const from = typeof state === "string" ? decode(state) : state;
  try {
    const ready = await given;
    const shelf = "atlases" in ready ? ready : { atlases: [{ name: "", source: ready }] };
    if (!shelf.atlases.length) throw new Error("there is no atlas");
    const metas = await metasOf(shelf, among(from, shelf.atlases.length));
    if (metas.shown.maps.length === 0) throw new Error("there is no attention map in it");
    return new Explorer(element, shelf, metas, from, options);
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    replace(element, make("p", { class: "regard-failure", set: { role: "alert" } }, `Nothing to show: ${words}`));
    throw error;
  }
}
