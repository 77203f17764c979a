/** The explorer in an element: its state, its views, and what connects them. */

import { Beam } from "./beam.ts";
import { among, atlasKey, carried, compared, type Metas, metasOf, neighbour, ofText } from "./atlases.ts";
import { addressFaults, faultWords } from "./address_faults.ts";
import type { Context, ViewPart } from "./context.ts";
import { makeContext, type Shared } from "./make_context.ts";
import { contributionFault, contributions } from "./contributions.ts";
import { openHelp } from "./dialogs.ts";
import { make, replace } from "./dom.ts";
import { EffectStore } from "./effects/effect_store.ts";
import { EffectsPanel } from "./effects/effects_panel.ts";
import { type Kind, saveView } from "./exports.ts";
import { GoTo } from "./goto.ts";
import { Header } from "./header.ts";
import { isNothing, type Kept, keptIn, NOTHING, sameKept } from "./kept.ts";
import { KeptBar } from "./kept_bar.ts";
import { keptByWords, type Texts, textsOf } from "./kept_words.ts";
import { isTyping, keyChange, moves } from "./keyboard.ts";
import { LeftOut } from "./left_out.ts";
import type { Loader } from "./loader.ts";
import { type Palette, paletteOf } from "./palette.ts";
import type { Panel } from "./panel.ts";
import { brokenWords, partWords } from "./notices.ts";
import { CollectionBar, shortLabels } from "./collection_bar.ts";
import { browserScheme, type Scheme } from "./scheme.ts";
import { decode, isStep, MOST_READ, openingState, type State, type View, within } from "./state.ts";
import type { Meta, Collection } from "./types.ts";
import { CompareView } from "./views/compare.ts";
import { GridView } from "./views/grid.ts";
import { HeadView } from "./views/head.ts";
import { LinesView } from "./views/lines.ts";
import { TableView } from "./views/table.ts";
import { TextView } from "./views/text.ts";
import { byWords, otherKept } from "./words.ts";

const VIEW_PARTS: Record<View, new (context: Context) => ViewPart> = {
  grid: GridView,
  head: HeadView,
  lines: LinesView,
  text: TextView,
  compare: CompareView,
  table: TableView,
};

export interface Options {
  /** "webgl", "canvas" or "auto". */
  renderer?: string;
  /** What is dark around it; the browser's where absent. */
  scheme?: Scheme;
  /** How to share what is shown, in words. */
  sharing?: string;
}

/** Told of each change; `step` where going back to the state before makes sense. */
export type Listener = (state: State, step: boolean) => void;

export class Explorer {
  private readonly element = make("div", { class: "regard-explorer", set: { tabindex: -1 } });
  private readonly main = make("main", {});
  private readonly status = make("div", { class: "status", set: { role: "status" } });
  private readonly above = make("div", { class: "slot" });
  private readonly below = make("div", { class: "slot" });
  private readonly faults = make("p", { class: "faults", set: { role: "alert", hidden: true } });
  private readonly bar = new CollectionBar({
    run: (text, signal) => this.run(text, signal),
    choose: (atlas) => this.update({ atlas }),
    compare: (against) => this.update(compared(against)),
    leave: () => this.focus(),
  });
  private readonly shared: Shared;
  private readonly listeners = new Set<Listener>();
  private readonly scheme: Scheme;
  private readonly sharing: string;
  private readonly unwatch: () => void;
  private context!: Context;
  /** Of the atlas that the shown one is compared with. */
  private other?: Context;
  private header!: Header;
  private beam!: Beam;
  private leftOut!: LeftOut;
  private kept!: KeptBar;
  private readonly effects = new EffectStore();
  private switching!: EffectsPanel;
  /** Why contributions cannot be shown; "" where they can. */
  private fault = "";
  /** Of the sources themselves; the contexts' are by words where these are chosen. */
  private metas!: Metas;
  private now: State;
  /** The state of a permalink whose text the model is run on. */
  private followed?: State;
  private view!: ViewPart;
  private shown!: View;
  private unlisten = (): void => undefined;
  private colours?: Palette;

  constructor(
    parent: Element,
    private collection: Collection,
    metas: Metas,
    state: State,
    options: Options = {},
  ) {
    this.now = among(state, collection.atlases.length);
    this.scheme = options.scheme ?? browserScheme();
    this.sharing = options.sharing ?? "";
    this.shared = {
      beside: () => this.other,
      before: () => this.before(),
      effects: this.effects,
      contributionFault: () => this.fault,
      renderer: options.renderer ?? "auto",
      state: () => this.now,
      update: (patch) => this.update(patch),
      palette: () => (this.colours ??= paletteOf(this.element)),
      announce: (text) => {
        this.status.textContent = text;
      },
    };
    replace(parent, this.element);
    replace(this.element, this.faults, this.above, this.bar.element, this.below, this.main, this.status);
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.unwatch = this.scheme.watch(() => this.themed());
    this.start(metas);
    this.follow(state);
  }

  /** From here on its keys are heard. */
  focus(): void {
    this.element.focus({ preventScroll: true });
  }

  /** What the atlas opens with where no address tells more. */
  get opening(): State {
    return openingState(this.metas.shown);
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
  restore(given: State): void {
    const { text, words, measure } = this.now;
    const state = among(ofText(given, this.collection), this.collection.atlases.length);
    if (state.text !== text && this.follow(state)) return;
    if (state.atlas !== this.now.atlas || state.against !== this.now.against) {
      this.now = state;
      void this.turn(false);
      return;
    }
    this.now = { ...within(state, this.context.meta), text };
    if (this.now.words !== words || this.now.measure !== measure) {
      this.stop();
      this.start(this.metas);
    }
    this.applyTheme();
    this.refresh();
  }

  /** Says what an address names that is not here. */
  checkAddress(hash: string): void {
    const faults = addressFaults(hash, this.context.meta, this.collection.atlases.length);
    if (this.fault && decode(hash).measure === "contribution") faults.push("measure=contribution");
    this.faults.textContent = faultWords(faults);
    this.faults.hidden = !this.faults.textContent;
  }

  destroy(): void {
    this.stop();
    this.bar.destroy();
    this.effects.destroy();
    this.unwatch();
    this.element.remove();
  }

  private start(metas: Metas): void {
    this.metas = metas;
    this.fault = this.faultOfContributions(metas);
    if (this.fault) this.now = { ...this.now, measure: "weight" };
    const { atlas, against } = this.now;
    this.context = this.connect(metas.shown, atlas);
    if (against === atlas) this.other = this.context;
    else this.other = metas.other && against !== undefined ? this.connect(metas.other, against) : undefined;
    const { meta } = this.context;
    this.now = { ...within(this.now, meta), text: this.text() };
    this.beam = new Beam(this.context);
    this.header = new Header(this.context, {
      help: () => openHelp(this.element, this.sharing),
      goTo: () => this.goTo(),
      save: (kind) => void this.save(kind),
    });
    const part = partWords(meta, this.context.offers);
    const told = part ? make("p", { class: "part" }, part) : undefined;
    const focused = this.element.contains(document.activeElement);
    replace(this.above, this.header.element);
    const broken = brokenWords(meta, this.context.names);
    const warning = broken ? make("p", { class: "part broken", set: { role: "alert" } }, broken) : undefined;
    this.leftOut = new LeftOut();
    this.kept = new KeptBar(this.context);
    const { atlases, rerun, effects, noEffects } = this.collection;
    const earlier = rerun && atlases.length > 1 ? atlases[atlas ? 0 : 1].name : "";
    this.effects.show(effects, atlases[atlas].name, earlier);
    this.switching = new EffectsPanel(this.context, this.effects, noEffects);
    const row = make("section", { class: "kept-row", set: { "aria-label": "what is kept and switched off" } }, this.kept.element, this.switching.opener);
    replace(this.below, warning, told, this.leftOut.element, this.beam.element, row, this.switching.element);
    const loaders = new Set([this.context.loader, ...(this.other ? [this.other.loader] : [])]);
    const unlisten = [...loaders].map((loader) => loader.listen(() => this.arrived()));
    unlisten.push(this.effects.listen(() => this.view.redraw()));
    this.unlisten = () => unlisten.forEach((end) => end());
    this.applyTheme();
    this.shown = this.now.view;
    this.view = new VIEW_PARTS[this.shown](this.context);
    replace(this.main, this.view.element);
    this.refresh();
    if (!this.now.frame && String(this.now.window) === "0,0") this.view.reveal?.();
    // What had the focus may have gone; without it no key would be heard.
    if (focused && !this.element.contains(document.activeElement)) this.focus();
  }

  /** The text of the shown atlas, where a model can be run on another and the text is no longer than an address. */
  private text(): string {
    const name = this.collection.rerun ? this.collection.atlases[this.now.atlas].name : "";
    return name.length <= MOST_READ ? name : "";
  }

  /** Runs the model on the text of a permalink, if no atlas here is of it; whether it does. */
  private follow(state: State): boolean {
    if (!state.text || this.collection.atlases.some(({ name }) => name === state.text)) return false;
    if (!this.collection.rerun) {
      this.status.textContent = "The address has a text in it, and there is no model here to run on it.";
      return false;
    }
    this.followed = state;
    this.bar.read(state.text);
    return true;
  }

  private stop(): void {
    this.unlisten();
    this.switching.destroy();
    this.view.destroy();
    this.context.loader.clear();
    this.other?.loader.clear();
  }

  /** The model runs on another text; its atlas is shown, and where two were compared, beside the one before. */
  private async run(text: string, signal: AbortSignal): Promise<void> {
    const { followed } = this;
    const { at } = this.now;
    const texts = await textsOf(this.context, this.now.map, at);
    this.followed = undefined;
    const collection = await this.collection.rerun?.(text, signal);
    if (!collection) return;
    const from = followed ?? this.now;
    const against = from.against === undefined || collection.atlases.length < 2 ? undefined : 1;
    const metas = await metasOf(collection, { atlas: 0, against });
    this.stop();
    this.collection = collection;
    const nowhere = { frame: undefined, at: NOTHING, window: [0, 0] as [number, number] };
    const state = followed ?? { ...carried(this.now, this.metas.shown, metas.shown), ...nowhere };
    this.now = { ...state, atlas: 0, against };
    this.start(metas);
    if (!followed) await this.keepByWords(at, texts);
    this.tell(!followed);
  }

  /** Shows the atlases that the state names, once it is known what they have; `carry` if all else is of the old one. */
  private async turn(carry: boolean): Promise<void> {
    const { collection } = this;
    const { atlas, against } = this.now;
    this.bar.update(collection, this.now);
    const overtaken = () => collection !== this.collection || atlas !== this.now.atlas || against !== this.now.against;
    try {
      const { at } = this.now;
      const [metas, texts] = await Promise.all([
        metasOf(collection, this.now),
        textsOf(this.context, this.now.map, carry ? at : NOTHING),
      ]);
      if (overtaken()) return;
      const scrolled = this.view.element.scrollTop;
      this.stop();
      if (carry) this.now = carried(this.now, this.metas.shown, metas.shown);
      this.start(metas);
      this.view.element.scrollTop = scrolled;
      if (carry) await this.keepByWords(at, texts);
      this.tell(false);
    } catch (error) {
      if (overtaken()) return;
      this.now = { ...this.now, atlas: this.context.atlas.number, against: this.other?.atlas.number };
      this.refresh();
      this.status.textContent = `The source says: ${error instanceof Error ? error.message : String(error)}`;
    }
  }

  /** What was kept of another text is kept in this one, by its words. */
  private async keepByWords(kept: Kept, before: Texts): Promise<void> {
    if (isNothing(kept)) return;
    const { context } = this;
    const at = keptByWords(kept, before, await textsOf(context, this.now.map, kept));
    if (context !== this.context) return;
    this.now = within({ ...this.now, at }, context.meta);
    this.refresh();
    this.view.reveal?.();
    const lost = kept.query.length + kept.key.length - at.query.length - at.key.length;
    if (lost) this.kept.say(`This text does not have ${lost} of the kept tokens; let go.`);
  }

  private connect(given: Meta, atlas: number): Context {
    const own = this.collection.atlases[atlas].source;
    const measured = this.now.measure === "contribution" ? contributions(own, given) : { source: own, meta: given };
    const { source, meta } = this.now.words ? byWords(measured.source, measured.meta) : measured;
    const label = shortLabels(this.collection)[atlas];
    const tokenMaps = this.now.words ? given.maps : undefined;
    return makeContext(source, meta, { number: atlas, label }, this.shared, tokenMaps);
  }

  /** Of both atlases where two are shown. */
  private faultOfContributions({ shown, other }: Metas): string {
    const { atlas, against } = this.now;
    const { atlases } = this.collection;
    const second = other && against !== undefined ? contributionFault(atlases[against].source, other) : "";
    return contributionFault(atlases[atlas].source, shown) || second;
  }

  /** The atlas that changes are told since: the one that is compared with, else the one before in the list. */
  private before(): ReturnType<Context["before"]> {
    const { atlases, rerun } = this.collection;
    const { atlas, against, words } = this.now;
    const other = against !== undefined && against !== atlas ? against : neighbour(atlases.length, atlas);
    if (other === undefined || words || !atlases[atlas].source.compares?.(atlases[other].source)) return undefined;
    return { source: atlases[other].source, label: rerun ? "the text before" : shortLabels(this.collection)[other] };
  }

  private update(patch: Partial<State>): void {
    if (patch.words !== undefined && patch.words !== this.now.words) return this.merge(patch);
    if (patch.measure !== undefined && patch.measure !== this.now.measure) return this.measure(patch);
    const before = this.now;
    this.now = within({ ...before, ...patch }, this.context.meta);
    const shape = this.context.meta.maps[this.now.map];
    const old = this.context.meta.maps[before.map];
    // The same place in another map makes sense only where the maps have the same shape, and tokens only in their text.
    if (shape.queries !== old.queries || shape.keys !== old.keys) this.now = { ...this.now, frame: patch.frame };
    if (shape !== old) this.now = { ...this.now, at: patch.at ?? keptIn(before.at, old, shape) };
    this.now = among(this.now, this.collection.atlases.length);
    if (before.theme !== this.now.theme) this.applyTheme();
    if (this.now.atlas === before.atlas && this.now.against === before.against) this.refresh();
    else void this.turn(true);
    if (before.view !== this.now.view || !sameKept(before.at, this.now.at)) this.view.reveal?.();
    this.tell(isStep(before, this.now));
  }

  /** All maps anew, by words or by tokens; the chosen cell goes along, and so does the focus. */
  private merge(patch: Partial<State>): void {
    const before = this.now;
    const at = otherKept(this.metas.shown.maps[before.map], before.at, patch.words === true);
    this.anew({ ...before, ...patch, at, frame: undefined, window: [0, 0] });
  }

  /** All maps anew, by weights or by contributions; the place in them stays. */
  private measure(patch: Partial<State>): void {
    if (!this.fault) this.anew({ ...this.now, ...patch });
  }

  private anew(state: State): void {
    const before = this.now;
    const focused = (document.activeElement as HTMLElement | null)?.dataset.control;
    const scrolled = this.view.element.scrollTop;
    this.stop();
    this.now = state;
    this.start(this.metas);
    this.view.element.scrollTop = scrolled;
    if (focused) this.element.querySelector<HTMLElement>(`[data-control="${CSS.escape(focused)}"]`)?.focus();
    this.tell(isStep(before, this.now));
  }

  private tell(step: boolean): void {
    for (const listener of [...this.listeners]) listener(this.now, step);
  }

  private refresh(): void {
    if (this.now.view !== this.shown) {
      const focused = this.element.contains(document.activeElement);
      this.view.destroy();
      this.shown = this.now.view;
      this.view = new VIEW_PARTS[this.shown](this.context);
      replace(this.main, this.view.element);
      this.status.textContent = "";
      if (focused && !this.element.contains(document.activeElement)) this.focus();
    }
    this.header.update();
    this.bar.update(this.collection, this.now);
    this.beam.update();
    const { map, atlas, words, view } = this.now;
    const byWord = words && view !== "grid" && view !== "table" && this.metas.shown.maps[map] !== this.context.meta.maps[map];
    this.leftOut.update(this.collection.atlases[atlas].source, this.metas.shown.maps[map], map, byWord);
    this.kept.update();
    this.switching.update();
    this.view.update();
  }

  private arrived(): void {
    const error = this.context.loader.error || this.other?.loader.error;
    if (error) this.status.textContent = `The source says: ${error}`;
    this.kept.update();
    this.switching.update();
    this.view.redraw();
  }

  private themed(): void {
    this.applyTheme();
    this.view.redraw();
  }

  private applyTheme(): void {
    const dark = this.now.theme === "auto" ? this.scheme.dark() : this.now.theme === "dark";
    this.element.dataset.theme = dark ? "dark" : "light";
    this.colours = undefined;
  }

  private key(event: KeyboardEvent): void {
    if (isTyping(event) || event.defaultPrevented) return;
    const { panel } = this.view as { panel?: Panel };
    if ((panel && moves(panel, event)) || this.view.key?.(event) || this.ownKey(event.key)) {
      event.preventDefault();
      return;
    }
    const change =
      atlasKey(event.key, this.now, this.collection.atlases.length) ?? keyChange(event.key, this.now, this.context.meta);
    if (!change) return;
    event.preventDefault();
    this.update(change);
  }

  private ownKey(key: string): boolean {
    if (key === "?") openHelp(this.element, this.sharing);
    else if (key === "e") return this.bar.edit();
    else if (key === "z") return this.switching.toggle();
    else if (key === "g" || key === "/") this.goTo();
    else return false;
    return true;
  }

  private goTo(): void {
    new GoTo(this.context, this.element, (row, column) => {
      const panel = (this.view as { panel?: Panel }).panel;
      const { at } = this.now;
      // Where only one side is told, the other stays as it is kept.
      const kept = { query: row === undefined ? at.query : [row], key: column === undefined ? at.key : [column] };
      this.update({ at: kept });
      panel?.goTo(kept.query.at(-1), kept.key.at(-1));
    });
  }

  private async save(kind: Kind): Promise<void> {
    const name = `attention-${this.now.view}-${this.now.map}-${this.now.head}.${kind}`;
    try {
      await saveView(this.view, kind, name, this.context.palette().paper);
    } catch (error) {
      this.status.textContent = `Not saved: ${error instanceof Error ? error.message : String(error)}`;
    }
  }
}
