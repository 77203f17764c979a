/** The source of a served page: requests below the page's own address, all by GET but the one that runs a model. */

import { type Kept, sideText } from "../kept.ts";
import { checkedMeta, type HeadValue, type Measure, type Meta, type Reduce, type Region, type Collection, type Side, type Source, type TopList, type TopQuery } from "../types.ts";
import { asked } from "./asked.ts";
import { HttpEffects } from "./http_effects.ts";
import { checkLength, type Listed, type ListedAtlas, shownOf } from "./listed.ts";

/**
 * Everything below the address of a page: atlases at 0/, 1/, ..., and what can be done with them. Where a model reads
 * texts, the atlas of `text` comes first.
 */
export async function served(base: string, text = "", ready?: Listed, before?: ListedAtlas): Promise<Collection> {
  const listed = ready ?? ((await (await asked(new URL("atlases", base))).json()) as Listed);
  const shown = shownOf(listed, text, before);
  const atlases = shown.map(({ number, name }) => ({
    name,
    source: new HttpSource(new URL(`${number}/`, base).href, number),
  }));
  const effects = listed.effects ? new HttpEffects(base, listed.effects) : undefined;
  if (!listed.rerun) return { atlases, effects };
  const rerun = async (text: string, signal: AbortSignal): Promise<Collection> => {
    checkLength(text, listed.rerun);
    // The origin is sent with it by all browsers only where the page may be named as the referrer, too.
    const settings = { method: "POST", body: text, signal, referrerPolicy: "same-origin" } as const;
    return served(base, text, (await (await asked(new URL("rerun", base), settings)).json()) as Listed, shown[0]);
  };
  return { atlases, rerun, cancels: true, effects, noEffects: OTHER_MODEL };
}

/** Why a model that reads other texts may have no heads to switch off. */
const OTHER_MODEL = "It is for models that read one text, and for translators; this model reads one text and writes another.";

/** One atlas. */
export class HttpSource implements Source {
  /** `number`: by which the server calls it. */
  constructor(
    private readonly base: string,
    readonly number = 0,
  ) {}

  async meta(): Promise<Meta> {
    return checkedMeta(await (await this.fetch("meta", {})).json());
  }

  async tokens(map: number, side: Side, start: number, stop: number, signal?: AbortSignal): Promise<string[]> {
    return (await this.fetch("tokens", { map, side, start, stop }, signal)).json();
  }

  pooled(map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array> {
    return this.floats("pooled", { map, head, level, reduce }, signal);
  }

  overview(map: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array> {
    return this.floats("overview", { map, reduce }, signal);
  }

  weights(map: number, head: number, region: Region, signal?: AbortSignal): Promise<Float32Array> {
    const rows = `${region.row0}-${region.row1}`;
    return this.floats("weights", { map, head, rows, columns: `${region.column0}-${region.column1}` }, signal);
  }

  profile(map: number, head: number, which: string, signal?: AbortSignal): Promise<Float32Array> {
    return this.floats("profile", { map, head, which }, signal);
  }

  async top(map: number, head: number, asked: TopQuery, signal?: AbortSignal): Promise<TopList> {
    return (await this.fetch("top", { map, head, ...asked }, signal)).json();
  }

  norms(map: number, head: number, signal?: AbortSignal): Promise<Float32Array> {
    return this.floats("norms", { map, head }, signal);
  }

  pooledContributions(map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array> {
    return this.floats("pooled_contributions", { map, head, level, reduce }, signal);
  }

  kept(map: number, kept: Kept, by: Measure, signal?: AbortSignal): Promise<Float32Array> {
    return this.floats("kept", { map, queries: sideText(kept.query), keys: sideText(kept.key), by }, signal);
  }

  compares(other: Source): boolean {
    return other instanceof HttpSource;
  }

  async changes(other: Source, map: number, kept: Kept, signal?: AbortSignal): Promise<HeadValue[]> {
    const { number } = other as HttpSource;
    const query = { other: number, map, queries: sideText(kept.query), keys: sideText(kept.key) };
    return ((await (await this.fetch("changes", query, signal)).json()) as { heads: HeadValue[] }).heads;
  }

  private async floats(name: string, query: Query, signal?: AbortSignal): Promise<Float32Array> {
    return new Float32Array(await (await this.fetch(name, query, signal)).arrayBuffer());
  }

  private fetch(name: string, query: Query, signal?: AbortSignal): Promise<Response> {
    const address = new URL(name, this.base);
    for (const [key, value] of Object.entries(query)) address.searchParams.set(key, String(value));
    return asked(address, { signal });
  }
}

type Query = Record<string, string | number>;
