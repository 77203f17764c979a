/** The source of a served page: GET requests below the page's own address. */

import { checkedMeta, type Meta, type Reduce, type Region, type Side, type Source } from "../types.ts";

export class HttpSource implements Source {
  constructor(private readonly base: string) {}

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

  private async floats(name: string, query: Query, signal?: AbortSignal): Promise<Float32Array> {
    return new Float32Array(await (await this.fetch(name, query, signal)).arrayBuffer());
  }

  private async fetch(name: string, query: Query, signal?: AbortSignal): Promise<Response> {
    const address = new URL(name, this.base);
    for (const [key, value] of Object.entries(query)) address.searchParams.set(key, String(value));
    const response = await fetch(address, { signal, credentials: "omit", referrerPolicy: "no-referrer" });
    if (response.ok) return response;
    const told = (await response.json().catch(() => ({}))) as { error?: unknown };
    throw new Error(typeof told.error === "string" ? told.error : `${name}: status ${response.status}`);
  }
}

type Query = Record<string, string | number>;
