/** The one module of page, static file and notebook. */

import { among, metasOf } from "./atlases.ts";
import { make, replace } from "./dom.ts";
import { Explorer, type Options } from "./explorer.ts";
import { EmbeddedSource } from "./sources/embedded.ts";
import { HttpSource, served } from "./sources/http.ts";
import { type Answer, Messages, MessageSource, told } from "./sources/messages.ts";
import { decode, encode, type State } from "./state.ts";
import type { Shelf, Source } from "./types.ts";

export { decode, EmbeddedSource, encode, Explorer, HttpSource, Messages, MessageSource, served, told };

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

const HISTORY_PAUSE = 250;

/** A whole page: the state is kept in the address, and back and forward lead through its steps. */
async function page(root: HTMLElement): Promise<void> {
  const embedded = document.getElementById("regard-data");
  const held = embedded && EmbeddedSource.from(embedded);
  const source = held ?? served(new URL("./", location.href).href);
  const start = held?.state ?? "";
  const renderer = new URLSearchParams(location.search).get("renderer") ?? "auto";
  const explorer = await mount(root, source, location.hash || start, { renderer });
  let timer = 0;
  let unwritten: State | undefined;
  const write = (state: State, step: boolean) => {
    // What is all as by default needs a word where a page opens otherwise.
    const hash = `#${encode(state) || (start && "view=grid")}`;
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
    explorer.restore(decode(location.hash || start));
  });
  Object.assign(root, { explorer });
}

/** A notebook's model, as anywidget hands it over. */
interface WidgetModel {
  get(name: string): unknown;
  send(message: unknown): void;
  on(event: "msg:custom", listener: Listener): void;
  off?(event: "msg:custom", listener: Listener): void;
}

type Listener = (message: Answer, buffers: readonly DataView[]) => void;

/** For anywidget: `export default { render }`. */
export default {
  async render({ model, el }: { model: WidgetModel; el: HTMLElement }): Promise<() => void> {
    let heard: Listener = () => undefined;
    const channel = {
      send: (message: unknown) => model.send(message),
      listen: (listener: Listener) => model.on("msg:custom", (heard = listener)),
    };
    const root = make("div", { class: "regard-cell" });
    const height = Number(model.get("height"));
    if (height > 0) root.style.height = `${height}px`;
    el.append(root);
    const explorer = await mount(root, told(new Messages(channel)), String(model.get("state") ?? ""));
    return () => {
      model.off?.("msg:custom", heard);
      explorer.destroy();
    };
  },
};

const root = typeof document === "undefined" ? null : document.getElementById("regard-explorer");
if (root) void page(root).catch(() => undefined);
