/** The context of an atlas: source, caches, view state and palette, shared by all views. */

import type { EffectStore } from "./effects/effect_store.ts";
import { type Kept, keptIn, keptWithin } from "./kept.ts";
import type { Loader, Need } from "./loader.ts";
import { type Means, members } from "./means.ts";
import type { Palette } from "./palette.ts";
import type { Raster } from "./raster.ts";
import type { Bounded } from "./rendering/painter.ts";
import type { Picture } from "./shapes.ts";
import type { State } from "./state.ts";
import type { Tokens } from "./tokens.ts";
import type { AttentionMap, Meta, Region, Source } from "./types.ts";

export interface Context {
  readonly source: Source;
  readonly meta: Meta;
  readonly loader: Loader;
  readonly tokens: Tokens;
  /** Means of several heads, as heads of their own. */
  readonly means: Means;
  /** The maps by tokens, where those of `meta` are between words. */
  readonly tokenMaps?: readonly AttentionMap[];
  /** Rasters computed from what the loader holds. */
  readonly derived: Bounded<Raster>;
  /** Names of the maps without what all have in common. */
  readonly names: string[];
  /** Which atlas of those that are shown it is about, and what that is called; "" where there is one only. */
  readonly atlas: { number: number; label: string };
  /** The context of the atlas that this one is compared with. */
  beside(): Context | undefined;
  /** Another atlas whose heads can be asked how much they changed since, and what that is called. */
  before(): { source: Source; label: string } | undefined;
  /** What was measured with heads switched off. */
  readonly effects: EffectStore;
  /** Why contributions cannot be shown, in words; "" where they can. */
  contributionFault(): string;
  /** "webgl" or "canvas" to insist, "auto" to let the machine decide. */
  readonly renderer: string;
  state(): State;
  update(patch: Partial<State>): void;
  palette(): Palette;
  /** Says something to those who cannot see the picture, and in the status line. */
  announce(text: string): void;
  offers(map: number, head: number, level: number, region?: Region): boolean;
}

/** One of the explorer's views. */
export interface ViewPart {
  readonly element: HTMLElement;
  /** Called after every change of the state. */
  update(): void;
  /** Called when something arrived or the window changed its size. */
  redraw(): void;
  /** Brings what is kept into sight. */
  reveal?(): void;
  /** Whether the view has used the key. */
  key?(event: KeyboardEvent): boolean;
  /** Waits for all that a picture of the view needs, also where it is out of sight. */
  prepare?(): Promise<void>;
  picture?(): Picture;
  csv?(): Promise<string>;
  npz?(): Promise<Uint8Array<ArrayBuffer>>;
  destroy(): void;
}

/** The head that one-head views show: the chosen one, or the mean of several. */
export function shownHead(context: Context): number {
  const state = context.state();
  const all = members(context.meta, state);
  return all.length ? context.means.head(state.map, all) : state.head;
}

export function headTitle(context: Context, map: number, head: number): string {
  const { label } = context.atlas;
  return label ? `${label} · ${headName(context, map, head)}` : headName(context, map, head);
}

/** Without the atlas that it is of. */
export function headName(context: Context, map: number, head: number): string {
  const of = context.meta.maps[map];
  const calls = context.meta.maps.some((other) => other.call > 0 && !other.hypothesis);
  const call = calls && !of.hypothesis ? ` · call ${of.call}` : "";
  const hypothesis = of.hypothesis ? ` · translation ${of.hypothesis.rank + 1}` : "";
  const sequence = context.meta.maps.some((other) => other.sequence > 0) ? ` · sequence ${of.sequence}` : "";
  const averaged = context.means.of(map, head);
  const layers = new Set(averaged?.map((one) => one.map));
  const layer = layers.size > 1 ? `${layers.size} layers` : context.names[map];
  const name = averaged ? `mean of ${averaged.length} heads · ${layer}` : `${context.names[map]} · head ${head}`;
  return `${name}${hypothesis}${call}${sequence}`;
}

/** What a map has of what is kept. */
export function keptOf(context: Context, map: number): Kept {
  const { maps } = context.meta;
  const { at, map: shown } = context.state();
  return keptWithin(maps[shown] ? keptIn(at, maps[shown], maps[map]) : at, maps[map]);
}

/** What is there, asking for nothing. */
export function present(loader: Loader): Need {
  return (key) => loader.peek(key);
}
