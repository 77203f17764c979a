/** Entry point of the page, the static file and the notebook widget. */

import { Explorer } from "./explorer.ts";
import { mount } from "./mount.ts";
import { render } from "./notebook.ts";
import { EmbeddedSource } from "./sources/embedded.ts";
import { HttpSource, served } from "./sources/http.ts";
import { Messages, MessageSource, told } from "./sources/messages.ts";
import { decode, encode, type State } from "./state.ts";

export { decode, EmbeddedSource, encode, Explorer, HttpSource, Messages, MessageSource, mount, served, told };

const HISTORY_PAUSE = 250;

/** A frame in a notebook has no address of its own. */
function sharing(): string {
  return location.protocol === "about:" ? "" : "Every view has its own address: copy it to share what you see.";
}

/** A whole page: the state is kept in the address, and back and forward lead through its steps. */
async function page(root: HTMLElement): Promise<void> {
  const embedded = document.getElementById("regard-data");
  const held = embedded && EmbeddedSource.from(embedded);
  const source = held ?? served(new URL("./", location.href).href, decode(location.hash).text);
  const start = held?.state ?? "";
  const renderer = new URLSearchParams(location.search).get("renderer") ?? "auto";
  const explorer = await mount(root, source, location.hash || start, { renderer, sharing: sharing() });
  explorer.focus();
  // Where nothing tells how the page opens, a translation opens on its cross-attention.
  const opensElsewhere = start !== "" || explorer.opening.view !== "grid";
  // The text that the model read is in the address from the beginning; that of a permalink stays until it was run.
  const { text } = explorer.state;
  if (text && !decode(location.hash).text) history.replaceState(null, "", `#${encode(explorer.state)}`);
  let timer = 0;
  let unwritten: State | undefined;
  const write = (state: State, step: boolean) => {
    // What is all as by default needs a word where a page opens otherwise.
    const hash = `#${encode(state) || (opensElsewhere && "view=grid")}`;
    if (hash === location.hash || (hash === "#" && location.hash === "")) return;
    try {
      if (step) history.pushState(null, "", hash);
      else history.replaceState(null, "", hash);
    } catch {
      // A frame in a sandbox, as in a notebook, has no address of its own to keep it in.
    }
  };
  explorer.listen((state, step) => {
    clearTimeout(timer);
    if (step) {
      if (unwritten) write(unwritten, false);
      unwritten = undefined;
      write(state, true);
      return;
    }
    // Browsers limit how often the address may change.
    unwritten = state;
    timer = window.setTimeout(() => {
      unwritten = undefined;
      write(state, false);
    }, HISTORY_PAUSE);
  });
  window.addEventListener("popstate", () => {
    clearTimeout(timer);
    unwritten = undefined;
    explorer.restore(location.hash || start ? decode(location.hash || start) : explorer.opening);
    explorer.checkAddress(location.hash || start);
  });
  Object.assign(root, { explorer });
}

/** For anywidget. */
export default { render };

const root = typeof document === "undefined" ? null : document.getElementById("regard-explorer");
if (root) void page(root).catch(() => undefined);
