/** What was measured with heads switched off, whatever view or atlas is shown meanwhile; one run at a time. */

import type { Before, Effect, EffectCost, EffectRequest, EffectService, Replacement } from "./effect_types.ts";

/** What can be switched off. */
export const SWITCHED = ["head", "layer", "token", "link", "links", "all"] as const;
export type Switched = (typeof SWITCHED)[number];

/** So many single results stay in sight. */
const MOST_RESULTS = 6;

/** One run: of all heads it grows. */
export interface Measured {
  request: EffectRequest;
  /** What was switched off, and what stood in its place, in words. */
  title: string;
  /** What is compared, in words. */
  compared: string;
  before?: Before;
  effects: Effect[];
  state: "running" | "done" | "cancelled" | "failed";
  error?: string;
}

/** The choices of a reader, which stay while views and atlases change. */
export interface EffectChoices {
  open: boolean;
  switched: Switched;
  replace: Replacement;
  reference: string;
}

export class EffectStore {
  readonly choices: EffectChoices = { open: false, switched: "head", replace: "zero", reference: "" };
  /** The newest first; those of all heads among them. */
  private measured: Measured[] = [];
  private controller?: AbortController;
  private service?: EffectService;
  private readonly listeners = new Set<() => void>();
  /** The text that is shown, as the model reads it. */
  text = "";
  /** The text that was read before it; "" where there is none. */
  earlier = "";

  /** The model, where it is here. */
  get model(): EffectService | undefined {
    return this.service;
  }

  get running(): Measured | undefined {
    return this.measured.find(({ state }) => state === "running");
  }

  /** What was measured of this text. */
  get results(): readonly Measured[] {
    return this.measured.filter(({ request }) => request.text === this.text);
  }

  /** All heads of this text, one by one, if that is done. */
  get table(): Measured | undefined {
    return this.results.find(({ request, state }) => request.terms === null && state === "done");
  }

  show(service: EffectService | undefined, text: string, earlier: string): void {
    this.service = service;
    this.text = text;
    this.earlier = earlier;
  }

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  async cost(request: EffectRequest, signal: AbortSignal): Promise<EffectCost> {
    if (!this.service) throw new Error("there is no model here");
    return this.service.cost(request, signal);
  }

  /** Measures in the background; what is there already is told with every line. */
  async run(request: EffectRequest, title: string, compared: string): Promise<void> {
    if (!this.service || this.running) return;
    const controller = (this.controller = new AbortController());
    const one: Measured = { request, title, compared, effects: [], state: "running" };
    this.measured = [one, ...this.measured].slice(0, MOST_RESULTS);
    this.tell();
    try {
      for await (const line of this.service.measure(request, controller.signal)) {
        if ("error" in line) throw new Error(line.error);
        if ("of" in line) one.before = line;
        else if ("done" in line) one.effects.push(line);
        this.tell();
      }
      one.state = one.before && one.effects.length === one.before.of ? "done" : "failed";
      if (one.state === "failed") one.error = "the answer ended too early";
    } catch (error) {
      one.state = controller.signal.aborted ? "cancelled" : "failed";
      one.error = error instanceof Error ? error.message : String(error);
    }
    this.tell();
  }

  cancel(): void {
    this.controller?.abort();
  }

  destroy(): void {
    this.cancel();
    this.listeners.clear();
  }

  private tell(): void {
    for (const listener of [...this.listeners]) listener();
  }
}

/** Effects of heads by the names of their modules, the greatest size first. */
export function ranked(effects: readonly Effect[]): Effect[] {
  return [...effects].sort((a, b) => Math.abs(b.value ?? 0) - Math.abs(a.value ?? 0));
}
