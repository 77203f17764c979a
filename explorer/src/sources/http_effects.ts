/** The model of a server, whose heads are switched off there: one question at a time, since it answers one at a time. */

import type { EffectCost, EffectLine, EffectRequest, EffectService, ModelKind } from "../effects/effect_types.ts";
import { asked } from "./asked.ts";

/** What a list of atlases says of the model. */
export interface ListedEffects {
  kind: ModelKind;
  modules: { name: string; heads: number }[];
}

/** A run that was given up is over on the server only a moment later. */
const PATIENCE = 40;
const PAUSE = 100;

export class HttpEffects implements EffectService {
  readonly kind: ModelKind;
  readonly modules: ListedEffects["modules"];

  constructor(
    private readonly base: string,
    { kind, modules }: ListedEffects,
  ) {
    this.kind = kind;
    this.modules = modules;
  }

  async cost(request: EffectRequest, signal: AbortSignal): Promise<EffectCost> {
    return (await this.post("effects_cost", request, signal)).json();
  }

  async *measure(request: EffectRequest, signal: AbortSignal): AsyncIterable<EffectLine> {
    const { body } = await this.post("effects", request, signal);
    if (!body) throw new Error("the server gave no answer");
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) yield JSON.parse(line) as EffectLine;
      if (done) return;
    }
  }

  private async post(name: string, request: EffectRequest, signal: AbortSignal): Promise<Response> {
    const headers = { "content-type": "application/json" };
    // The origin is sent with it by all browsers only where the page may be named as the referrer, too.
    const settings = { method: "POST", body: JSON.stringify(request), headers, signal, referrerPolicy: "same-origin" } as const;
    for (let tries = 1; ; tries += 1) {
      try {
        return await asked(new URL(name, this.base), settings);
      } catch (error) {
        if (!/already/.test(String(error)) || tries >= PATIENCE || signal.aborted) throw error;
        await new Promise((resolve) => setTimeout(resolve, PAUSE));
      }
    }
  }
}
