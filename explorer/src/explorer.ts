/** The explorer in an element: its state, its views, and what connects them. */

import type { Context, ViewPart } from "./context.ts";
import { openHelp } from "./dialogs.ts";
import { make, replace } from "./dom.ts";
import { pngOf, save, svgOf } from "./exports.ts";
import { GoTo } from "./goto.ts";
import { Header, rerunBox } from "./header.ts";
import { isTyping, keyChange } from "./keyboard.ts";
import { Loader } from "./loader.ts";
import { type Palette, paletteOf } from "./palette.ts";
import type { Panel } from "./panel.ts";
import { Bounded } from "./rendering/painter.ts";
import { isStep, type State, type View, within } from "./state.ts";
import { shortNames } from "./text.ts";
import { Tokens } from "./tokens.ts";
import type { Meta, Source } from "./types.ts";
import { CompareView } from "./views/compare.ts";
import { GridView } from "./views/grid.ts";
import { HeadView } from "./views/head.ts";
import { LinesView } from "./views/lines.ts";
import { TableView } from "./views/table.ts";

const DERIVED_BYTES = 24e6;

const VIEW_PARTS: Record<View, new (context: Context) => ViewPart> = {
  grid: GridView,
  head: HeadView,
  lines: LinesView,
  compare: CompareView,
  table: TableView,
};

export interface Options {
  /** "webgl", "canvas" or "auto". */
  renderer?: string;
}

/** Told of each change; `step` where going back to the state before makes sense. */
export type Listener = (state: State, step: boolean) => void;

export class Explorer {
  private readonly element = make("div", { class: "regard-explorer", set: { tabindex: -1 } });
  private readonly main = make("main", {});
  private readonly status = make("footer", { class: "status", set: { role: "status" } });
  private readonly listeners = new Set<Listener>();
  private readonly dark = matchMedia("(prefers-color-scheme: dark)");
  private context!: Context;
  private header!: Header;
  private now: State;
  private view!: ViewPart;
  private shown!: View;
  private unlisten = (): void => undefined;
  private colours?: Palette;

  constructor(
    parent: Element,
    private readonly source: Source,
    meta: Meta,
    state: State,
    private readonly options: Options = {},
  ) {
    this.now = state;
    replace(parent, this.element);
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.dark.addEventListener("change", this.themed);
    this.start(meta);
    this.element.focus({ preventScroll: true });
  }

  get state(): State {
    return this.now;
  }

  /** For tests and the curious: how much is held, what was asked and dropped. */
  get loading(): Loader {
    return this.context.loader;
  }

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Another state as a whole, as from a permalink; listeners are not told. */
  restore(state: State): void {
    this.now = within(state, this.context.meta);
    this.applyTheme();
    this.refresh();
  }

  destroy(): void {
    this.stop();
    this.dark.removeEventListener("change", this.themed);
    this.element.remove();
  }

  private start(meta: Meta): void {
    this.now = within(this.now, meta);
    this.context = this.connect(meta);
    this.header = new Header(this.context, {
      help: () => openHelp(this.element),
      goTo: () => this.goTo(),
      save: (kind) => void this.save(kind),
    });
    const { source } = this;
    const rerun = source.rerun && rerunBox((text) => void this.rerun(text));
    replace(this.element, this.header.element, rerun, this.main, this.status);
    this.unlisten = this.context.loader.listen(() => this.arrived());
    this.applyTheme();
    this.shown = this.now.view;
    this.view = new VIEW_PARTS[this.shown](this.context);
    replace(this.main, this.view.element);
    this.refresh();
  }

  private stop(): void {
    this.unlisten();
    this.view.destroy();
    this.context.loader.clear();
  }

  /** The model runs on another text; what was kept of the run before is thrown away. */
  private async rerun(text: string): Promise<void> {
    this.status.textContent = "running the model …";
    try {
      await this.source.rerun?.(text);
      const meta = await this.source.meta();
      this.stop();
      this.now = { ...this.now, frame: undefined, at: undefined, window: [0, 0] };
      this.start(meta);
      this.status.textContent = "";
    } catch (error) {
      this.status.textContent = `The source says: ${error instanceof Error ? error.message : String(error)}`;
    }
  }

  private connect(meta: Meta): Context {
    const { source, options } = this;
    const loader = new Loader();
    return {
      source,
      meta,
      loader,
      tokens: new Tokens(source, meta, loader),
      derived: new Bounded(DERIVED_BYTES, () => undefined),
      names: shortNames(meta.maps.map((map) => map.name)),
      renderer: options.renderer ?? "auto",
      state: () => this.now,
      update: (patch) => this.update(patch),
      palette: () => (this.colours ??= paletteOf(this.element)),
      announce: (text) => {
        this.status.textContent = text;
      },
      offers: (map, head, level) => source.offers?.(map, head, level) ?? true,
    };
  }

  private update(patch: Partial<State>): void {
    const before = this.now;
    this.now = within({ ...before, ...patch }, this.context.meta);
    const shape = this.context.meta.maps[this.now.map];
    const old = this.context.meta.maps[before.map];
    // The same place in another map makes sense only where the maps have the same shape.
    if (shape.queries !== old.queries || shape.keys !== old.keys)
      this.now = { ...this.now, frame: patch.frame, at: patch.at };
    if (before.theme !== this.now.theme) this.applyTheme();
    this.refresh();
    for (const listener of [...this.listeners]) listener(this.now, isStep(before, this.now));
  }

  private refresh(): void {
    if (this.now.view !== this.shown) {
      this.view.destroy();
      this.shown = this.now.view;
      this.view = new VIEW_PARTS[this.shown](this.context);
      replace(this.main, this.view.element);
      this.status.textContent = "";
      if (!this.element.contains(document.activeElement)) this.element.focus({ preventScroll: true });
    }
    this.header.update();
    this.view.update();
  }

  private arrived(): void {
    if (this.context.loader.error) this.status.textContent = `The source says: ${this.context.loader.error}`;
    this.view.redraw();
  }

  private readonly themed = (): void => {
    this.applyTheme();
    this.view.redraw();
  };

  private applyTheme(): void {
    const dark = this.now.theme === "auto" ? this.dark.matches : this.now.theme === "dark";
    this.element.dataset.theme = dark ? "dark" : "light";
    this.colours = undefined;
  }

  private key(event: KeyboardEvent): void {
    if (isTyping(event) || event.defaultPrevented) return;
    if (this.panelKey(event) || this.view.key?.(event) || this.ownKey(event.key)) {
      event.preventDefault();
      return;
    }
    const change = keyChange(event.key, this.now, this.context.meta);
    if (!change) return;
    event.preventDefault();
    this.update(change);
  }

  private panelKey(event: KeyboardEvent): boolean {
    const panel = (this.view as { panel?: Panel }).panel;
    if (!panel) return false;
    const { key, shiftKey } = event;
    if (key === "+" || key === "=") panel.zoom(2);
    else if (key === "-" || key === "_") panel.zoom(0.5);
    else if (key === "0") panel.fit();
    else if (shiftKey && key === "ArrowLeft") panel.panBy(-0.25, 0);
    else if (shiftKey && key === "ArrowRight") panel.panBy(0.25, 0);
    else if (shiftKey && key === "ArrowUp") panel.panBy(0, -0.25);
    else if (shiftKey && key === "ArrowDown") panel.panBy(0, 0.25);
    else return false;
    return true;
  }

  private ownKey(key: string): boolean {
    if (key === "?") openHelp(this.element);
    else if ((key === "g" || key === "/") && this.now.view !== "table" && this.now.view !== "grid") this.goTo();
    else return false;
    return true;
  }

  private goTo(): void {
    new GoTo(this.context, this.element, (row, column) => {
      const panel = (this.view as { panel?: Panel }).panel;
      const { at, window } = this.now;
      // Where only one side is told, the other stays; on a self-attention map it is the diagonal.
      const own = this.context.meta.maps[this.now.map].kind === "self";
      const cell: [number, number] = [
        row ?? at?.[0] ?? (own ? (column ?? 0) : 0),
        column ?? at?.[1] ?? (own ? (row ?? 0) : 0),
      ];
      if (!panel) return this.update({ window: [row ?? window[0], column ?? window[1]] });
      const { queries, keys } = this.context.meta.maps[this.now.map];
      cell[0] = Math.min(cell[0], queries - 1);
      cell[1] = Math.min(cell[1], keys - 1);
      this.update({ at: cell });
      panel.goTo(...cell);
    });
  }

  private async save(kind: "png" | "svg" | "csv"): Promise<void> {
    const name = `attention-${this.now.view}-${this.now.map}-${this.now.head}.${kind}`;
    const { paper } = this.context.palette();
    try {
      if (kind === "csv" && this.view.csv) save(new Blob([await this.view.csv()], { type: "text/csv" }), name);
      else if (this.view.picture && kind === "svg")
        save(new Blob([svgOf(this.view.picture(), paper)], { type: "image/svg+xml" }), name);
      else if (this.view.picture && kind === "png") save(await pngOf(this.view.picture(), paper), name);
    } catch (error) {
      this.status.textContent = `Not saved: ${error instanceof Error ? error.message : String(error)}`;
    }
  }
}
