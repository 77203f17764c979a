/** The bar at the top: title, views, which head, colours, theme, exports. */

import { COLOUR_MAPS, type ColourMap } from "./colour.ts";
import type { Context } from "./context.ts";
import { button, make, replace, select } from "./dom.ts";
import type { Kind } from "./exports.ts";
import { mapsOf } from "./hypotheses.ts";
import { showsOneHead, THEMES, type Theme, type View, VIEWS } from "./state.ts";
import { plain } from "./text.ts";

const LABELS: Record<View, string> = {
  grid: "Heads",
  head: "Heat map",
  lines: "Lines",
  text: "Text",
  compare: "Compare",
  table: "Table",
};

/** What each view can be saved as. */
const KINDS: Record<View, readonly Kind[]> = {
  grid: ["png", "svg"],
  head: ["png", "svg", "csv", "npz"],
  lines: ["png", "svg", "csv", "npz"],
  text: ["csv"],
  compare: ["png", "svg"],
  table: ["csv"],
};

export interface Actions {
  help(): void;
  goTo(): void;
  save(kind: Kind): void;
}

export class Header {
  readonly element = make("header", { class: "top" });
  private built = "";

  constructor(
    private readonly context: Context,
    private readonly actions: Actions,
  ) {}

  update(): void {
    const state = this.context.state();
    const made = JSON.stringify([state.view, state.map, state.head, state.mean, state.colours, state.theme, state.pins.length, state.against]);
    if (made === this.built) return;
    this.built = made;
    // The same control keeps the focus when the bar is built anew.
    const controls = "button, select, input";
    const focused = [...this.element.querySelectorAll(controls)].indexOf(document.activeElement as Element);
    replace(
      this.element,
      this.title(),
      this.views(),
      this.heads(),
      make("span", { class: "spring" }),
      ...this.looks(),
      ...this.tools(),
    );
    if (focused >= 0) (this.element.querySelectorAll(controls)[focused] as HTMLElement | undefined)?.focus();
  }

  private title(): HTMLElement {
    const title = plain(this.context.meta.title || "attention", 120);
    return make("h1", { set: { title } }, title);
  }

  private views(): HTMLElement {
    const state = this.context.state();
    const tabs = VIEWS.map((view) => {
      const pins = view === "compare" && state.pins.length ? ` ${state.pins.length}` : "";
      return button(LABELS[view] + pins, () => this.context.update({ view }), {
        class: "tab",
        set: { "aria-current": view === state.view ? "page" : undefined, "data-view": view },
      });
    });
    return make("nav", { set: { "aria-label": "views" } }, ...tabs);
  }

  private heads(): HTMLElement | undefined {
    const state = this.context.state();
    if (!showsOneHead(state)) return undefined;
    const { meta, names } = this.context;
    const places = mapsOf(meta, state.hypothesis);
    const maps = places.map((at) => {
      const map = meta.maps[at];
      const several = places.some((other) => other !== at && meta.maps[other].name === map.name);
      return { value: String(at), label: several ? `${names[at]} #${map.call}.${map.sequence}` : names[at] };
    });
    const heads = Array.from({ length: meta.maps[state.map].heads }, (_, head) => ({
      value: String(head),
      label: `head ${head}`,
    }));
    return make(
      "span",
      { class: "which" },
      select("Layer", maps, String(state.map), (map) => this.context.update({ frame: state.frame, map: Number(map) }), true),
      select("Head", heads, String(state.head), (head) => this.context.update({ head: Number(head), mean: "" }), true),
    );
  }

  private looks(): HTMLElement[] {
    const state = this.context.state();
    const colours = COLOUR_MAPS.map((value) => ({ value, label: value }));
    const themes = THEMES.map((value) => ({ value, label: value === "auto" ? "auto theme" : value }));
    return [
      select("Colours", colours, state.colours, (value) => this.context.update({ colours: value as ColourMap }), true),
      select("Theme", themes, state.theme, (value) => this.context.update({ theme: value as Theme }), true),
    ];
  }

  private tools(): HTMLElement[] {
    const { view } = this.context.state();
    const saves = KINDS[view].map((kind) =>
      button(kind.toUpperCase(), () => this.actions.save(kind), {
        set: { "data-save": kind, title: `save this view as ${kind.toUpperCase()}` },
      }),
    );
    const goTo = button("Go to", () => this.actions.goTo(), { set: { title: "keep an index or a token (g)" } });
    return [
      goTo,
      make("span", { class: "group", set: { role: "group", "aria-label": "save" } }, ...saves),
      button("?", () => this.actions.help(), { class: "square", set: { "aria-label": "help", title: "keys (?)" } }),
    ];
  }
}
