/**
 * Serves synthetic atlases as the Python server serves real ones, with the same strict policy: the page at /NAME/, its
 * atlases at /NAME/0/..., and below /live/ a model that reads what is sent to /live/rerun.
 */

import { readFileSync } from "node:fs";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import { join } from "node:path";
import type { AddressInfo } from "node:net";
import type { Reduce, Side } from "../src/types.ts";
import { MOST_BYTES, type Named, read, steps } from "./collections.ts";
import { answerEffects, KINDS, listedEffects } from "./effects.ts";
import { changes, keptValues, norms, pooledContributions, topList, withNorms } from "./measures.ts";
import { forced, translation } from "./translation.ts";
import { broken, cross, hostile, long, profileOf, short, special, type SyntheticAtlas, weightsOf } from "./synthetic.ts";

export const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src data: blob:; connect-src 'self'; " +
  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const MAKERS: Record<string, () => SyntheticAtlas> = {
  short: () => short(12, 12, 512),
  small: () => withNorms(short(2, 4, 96)),
  long: () => long(100_000),
  cross,
  hostile,
  translation,
  forced,
  broken,
  special,
};

const COLLECTIONS: Record<string, () => Named[]> = {
  steps: () => steps(4),
  live: () => [read("it was late .")],
  strange: () => [{ ...read("it was very late already ."), name: "it was late ." }],
  predicts: () => [read("it was late .")],
  translates: () => [{ name: "the cat is there", atlas: translation() }],
};

/** As many atlases of runs stay. */
export const MOST_KEPT = 4;

const TYPES: Record<string, string> = { js: "text/javascript", css: "text/css", html: "text/html; charset=utf-8" };

export interface Served {
  address: string;
  server: Server;
  /** Every request that came. */
  asked: string[];
  atlas(name: string): SyntheticAtlas;
  /** One of several. */
  atlasOf(name: string, at: number): SyntheticAtlas;
  /** What waits to be done by the model; `undefined` lets it be done at once. */
  hold: Promise<void> | undefined;
}

/** The atlases of one address, a store by their texts. Numbers are not used again. */
class Kept {
  next: number;
  entries: { number: number; name: string; atlas: SyntheticAtlas }[];

  constructor(named: Named[]) {
    this.entries = named.map((one, number) => ({ number, ...one }));
    this.next = named.length;
  }

  add(named: Named): void {
    const there = this.entries.find(({ name }) => name === named.name);
    const others = this.entries.filter((entry) => entry !== there);
    this.entries = [there ?? { number: this.next, ...named }, ...others.slice(0, MOST_KEPT - 1)];
    if (!there) this.next += 1;
  }

  listed(name: string): unknown {
    const atlases = this.entries.map(({ number, name }) => ({ number, name }));
    const effects = Object.hasOwn(KINDS, name) ? listedEffects(name, this.entries[0].atlas) : null;
    return { atlases, rerun: name === "live" ? MOST_BYTES : 0, effects };
  }
}

/** Serves the built page in folder `web` and all atlases; a request waits `delay` ms, as an exact tile may. */
export async function serve(web: string, port = 0, delay = 0): Promise<Served> {
  const made = new Map<string, Kept>();
  const asked: string[] = [];
  const kept = (name: string) => {
    const named = () => COLLECTIONS[name]?.() ?? [{ name: "", atlas: MAKERS[name]() }];
    if (!made.has(name)) made.set(name, new Kept(named()));
    return made.get(name) as Kept;
  };
  const server: Server = createServer((request, response) => {
    asked.push(request.url ?? "");
    try {
      const [, name, what] = (request.url ?? "").split("/");
      if (request.method === "POST" && Object.hasOwn(KINDS, name) && what.startsWith("effects"))
        void answerEffects(name, what === "effects_cost", request, response, kept(name).entries[0].atlas, () => served.hold);
      else if (request.method === "POST") void rerun(request, response, kept, served);
      else answer(request, response, web, kept, delay);
    } catch (error) {
      response.writeHead(400, { "content-type": "application/json" }).end(JSON.stringify({ error: String(error) }));
    }
  });
  await new Promise<void>((resolve) => server.listen(port, "127.0.0.1", resolve));
  const { port: bound } = server.address() as AddressInfo;
  const atlas = (name: string) => kept(name).entries[0].atlas;
  const atlasOf = (name: string, at: number) => kept(name).entries[at].atlas;
  const served: Served = { address: `http://127.0.0.1:${bound}`, server, asked, atlas, atlasOf, hold: undefined };
  return served;
}

async function rerun(
  request: IncomingMessage,
  response: ServerResponse,
  kept: (name: string) => Kept,
  served: Served,
): Promise<void> {
  let text = "";
  for await (const chunk of request.setEncoding("utf8")) text += chunk;
  await served.hold;
  const tell = (status: number, body: unknown) =>
    response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
  const own = request.url === "/live/rerun" && request.headers.origin === served.address;
  if (!own || request.headers["content-type"] !== "text/plain;charset=UTF-8") return void tell(403, { error: "no" });
  if (text.includes("fail")) return void tell(400, { error: "the model cannot <b>read</b> this" });
  kept("live").add(read(text));
  tell(200, kept("live").listed("live"));
}

function answer(
  request: IncomingMessage,
  response: ServerResponse,
  web: string,
  kept: (name: string) => Kept,
  delay: number,
): void {
  const url = new URL(request.url ?? "/", "http://127.0.0.1");
  const [, name, first = "", what = ""] = url.pathname.split("/");
  const headers = { "content-security-policy": POLICY, "cache-control": "no-store" };
  if (!Object.hasOwn(MAKERS, name) && !Object.hasOwn(COLLECTIONS, name)) {
    response.writeHead(404, headers).end();
    return;
  }
  const file = first === "" ? "index.html" : first;
  if (["index.html", "explorer.js", "explorer.css"].includes(file)) {
    response
      .writeHead(200, { ...headers, "content-type": TYPES[file.split(".").pop() as string] })
      .end(readFileSync(join(web, file)));
    return;
  }
  const entry = kept(name).entries.find(({ number }) => String(number) === first);
  if (first !== "atlases" && !entry) throw new Error("this atlas is not kept any more");
  const body = entry ? data(entry.atlas, what, url.searchParams, (number) => kept(name).entries.find((other) => other.number === number)?.atlas) : kept(name).listed(name);
  const send = () => {
    if (body instanceof Float32Array)
      response.writeHead(200, { ...headers, "content-type": "application/octet-stream" }).end(Buffer.from(body.buffer));
    else response.writeHead(200, { ...headers, "content-type": "application/json" }).end(JSON.stringify(body));
  };
  if (delay && what === "weights") setTimeout(send, delay);
  else send();
}

function data(atlas: SyntheticAtlas, what: string, query: URLSearchParams, other: (number: number) => SyntheticAtlas | undefined): unknown {
  if (what === "meta") return atlas.meta;
  if (what === "changes") {
    const before = other(Number(query.get("other")));
    if (!before) throw new Error("there is no such atlas here to compare with");
    return changes(atlas, before, query);
  }
  const map = atlas.maps[Number(query.get("map"))];
  const head = Number(query.get("head"));
  const range = (name: string) => (query.get(name) ?? "").split("-").map(Number);
  if (what === "tokens") {
    const [start, stop] = [Number(query.get("start")), Number(query.get("stop"))];
    return Array.from({ length: stop - start }, (_, i) => map.token(query.get("side") as Side, start + i));
  }
  if (what === "pooled") return map.pooled(head, Number(query.get("level")), query.get("reduce") as Reduce);
  if (what === "overview") {
    const [rows, columns] = map.map.levels[map.map.levels.length - 1];
    const all = new Float32Array(map.map.heads * rows * columns);
    for (let at = 0; at < map.map.heads; at += 1) {
      const one = map.pooled(at, map.map.levels.length - 1, query.get("reduce") as Reduce);
      all.set(one, at * rows * columns);
    }
    return all;
  }
  if (what === "kept") return keptValues(map, query);
  if (what === "top") return topList(map, head, query);
  if (what === "norms") return norms(map, head);
  if (what === "pooled_contributions") return pooledContributions(map, head, Number(query.get("level")), query.get("reduce") as Reduce);
  if (what === "profile") return profileOf(map, head, query.get("which") ?? "");
  if (what === "weights") {
    const [[row0, row1], [column0, column1]] = [range("rows"), range("columns")];
    if (row1 - row0 > 256 || column1 - column0 > 256) throw new Error("at most 256 × 256 weights");
    return weightsOf(map, head, { row0, row1, column0, column1 });
  }
  throw new Error(`there is no ${what}`);
}

if (process.argv[2] === "serve") {
  const served = await serve(process.argv[3], Number(process.argv[4] ?? 8000));
  for (const name of [...Object.keys(MAKERS), ...Object.keys(COLLECTIONS)]) console.log(`${served.address}/${name}/`);
}
