/** A model whose heads can be switched off, as the server has one: effects are a formula, so that they are known. */

import type { IncomingMessage, ServerResponse } from "node:http";
import type { EffectRequest, ModelKind } from "../src/effects/effect_types.ts";
import { noise, type SyntheticAtlas } from "./synthetic.ts";

export const KINDS: Record<string, ModelKind> = { live: "encoder", strange: "encoder", predicts: "language model", translates: "translator" };

/** What `atlases` tells of it. */
export function listedEffects(name: string, atlas: SyntheticAtlas): unknown {
  const modules = atlas.maps.map(({ map }) => ({ name: map.name, heads: map.heads }));
  return { kind: KINDS[name], modules };
}

/** The effect of a head: of a translator and of a language model it has a sign. */
export function effectOf(kind: ModelKind, module: number, head: number): number {
  const size = Math.round(1e4 * noise(module, head, 5)) / 1e4;
  return kind === "encoder" || (module + head) % 2 ? size : -size;
}

/** Answers a POST to /effects and /effects_cost; `wait` is kept before each line. */
export async function answerEffects(name: string, cost: boolean, request: IncomingMessage, response: ServerResponse, atlas: SyntheticAtlas, wait: () => Promise<void> | undefined): Promise<void> {
  let body = "";
  for await (const chunk of request.setEncoding("utf8")) body += chunk;
  const asked = JSON.parse(body) as EffectRequest;
  const refuse = (error: string) => void response.writeHead(400, { "content-type": "application/json" }).end(JSON.stringify({ error }));
  if (request.headers["content-type"] !== "application/json") return refuse("a text is taken as application/json");
  const kind = KINDS[name];
  const { terms, replace, reference } = asked;
  if (reference?.includes("fail")) return refuse("the model cannot <b>read</b> this");
  if (kind === "translator" && asked.token !== null) return refuse("token needs to be null");
  const heads = atlas.maps.flatMap(({ map }, at) => Array.from({ length: map.heads }, (_, head) => ({ at, head, module: map.name })));
  const one = atlas.maps.findIndex(({ map }) => map.name === terms?.module);
  const chosen = terms === null ? heads : [{ at: Math.max(one, 0), head: terms.heads?.[0] ?? 0, module: terms.module }];
  if (cost) {
    const told = { interventions: chosen.length, seconds: 0.25 * chosen.length, tokens: asked.text.split(" ").length };
    response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(told));
    return;
  }
  response.writeHead(200, { "content-type": "application/x-ndjson" });
  const line = (value: unknown) => response.write(`${JSON.stringify(value)}\n`);
  const next = [["down", 0.5], [" <b>up</b>", 0.25]];
  const before = kind === "encoder" ? {} : kind === "translator" ? { text: "le chat est là", score: -1.5 } : { next };
  const [map] = atlas.maps;
  const others = Array.from({ length: map.map.queries - 1 }, (_, at) => at + 1);
  const alignment = replace === "before" ? { pairs: [[0, 0]], missing_before: [1], missing_now: others, tokens: { before: ["rained"], now: others.map((at) => map.token("query", at)) } } : null;
  line({ before, of: chosen.length, alignment });
  let done = 0;
  for (const { at, head, module } of chosen) {
    await wait();
    if (response.destroyed) return;
    const value = effectOf(kind, at, head);
    const changed = Math.abs(value) > 0.5;
    const after = kind === "encoder" ? {} : kind === "translator" ? { text: changed ? "le chien est là" : "le chat est là", score: value, changed } : { next: [["up", 0.75], ["down", 0.125]], probability: 0.125 };
    done += 1;
    line({ done, module, head: terms === null || terms.heads?.length === 1 ? head : null, value, distance: 2 * value, after });
  }
  line({ ranked: [] });
  response.end();
}
