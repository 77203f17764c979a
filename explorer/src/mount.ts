/** Mounts an explorer in an element, or shows an error message there. */

import { among, metasOf, ofText } from "./atlases.ts";
import { make, replace } from "./dom.ts";
import { Explorer, type Options } from "./explorer.ts";
import { decode, openingState, type State } from "./state.ts";
import type { Collection, Source } from "./types.ts";

/** Shows one atlas or several inside an element; `start` is as after # of a permalink, or what `decode` gave. */
export async function mount(
  element: Element,
  given: Source | Collection | Promise<Collection>,
  start: string | State = "",
  options: Options = {},
): Promise<Explorer> {
  const from = typeof start === "string" ? decode(start) : start;
  try {
    const ready = await given;
    const collection = "atlases" in ready ? ready : { atlases: [{ name: "", source: ready }] };
    if (!collection.atlases.length) throw new Error("there is no atlas");
    let state = among(ofText(from, collection), collection.atlases.length);
    const metas = await metasOf(collection, state);
    if (metas.shown.maps.length === 0) throw new Error("there is no attention map in it");
    if (start === "") state = { ...openingState(metas.shown), atlas: state.atlas, against: state.against };
    const explorer = new Explorer(element, collection, metas, state, options);
    if (typeof start === "string") explorer.checkAddress(start);
    return explorer;
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    replace(element, make("p", { class: "regard-failure", set: { role: "alert" } }, `Nothing to show: ${words}`));
    throw error;
  }
}
