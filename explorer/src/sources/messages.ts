/** The source of a notebook: requests and answers as messages, numbers as binary buffers. */

import { type Kept, sideText } from "../kept.ts";
import { checkedMeta, type HeadValue, type Measure, type Meta, type Reduce, type Region, type Collection, type Side, type Source, type TopList, type TopQuery } from "../types.ts";
import { checkLength, type Listed, type ListedAtlas, shownOf } from "./listed.ts";

/**
 * {id, method, arguments} goes out; {id, result} or {id, error} comes back; numbers come as one buffer. The answers to
 * all views of one model come to each of them.
 */
export interface Channel {
  send(message: { id: string; method: string; arguments: Arguments }): void;
  listen(listener: (message: Answer, buffers: readonly (ArrayBuffer | ArrayBufferView)[]) => void): void;
}

export interface Answer {
  id: string;
  result?: unknown;
  error?: string;
}

type Arguments = Record<string, unknown>;

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
}

/** Questions with their answers, which come in any order. */
export class Messages {
  private readonly waiting = new Map<string, Waiting>();
  /** Of this view alone. */
  private readonly name = Math.random().toString(36).slice(2);
  private next = 1;

  constructor(private readonly channel: Channel) {
    channel.listen((answer, buffers) => this.settle(answer, buffers));
  }

  ask(method: string, args: Arguments, signal?: AbortSignal): Promise<unknown> {
    const id = `${this.name}.${this.next}`;
    this.next += 1;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        this.waiting.delete(id);
        reject(new Error("no longer wanted"));
      });
      try {
        this.channel.send({ id, method, arguments: args });
      } catch {
        this.waiting.delete(id);
        reject(new Error("the kernel that made this is gone; run the cell again"));
      }
    });
  }

  private settle(answer: Answer, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void {
    const waiting = this.waiting.get(answer?.id);
    if (!waiting) return;
    this.waiting.delete(answer.id);
    if (answer.error !== undefined) waiting.reject(new Error(answer.error));
    else waiting.resolve(buffers.length ? float32(buffers[0]) : answer.result);
  }
}

/** All atlases that the other end has. A run cannot be cancelled from here: the notebook interrupts its kernel. */
export async function told(messages: Messages, text = "", ready?: Listed, before?: ListedAtlas): Promise<Collection> {
  const listed = ready ?? ((await messages.ask("atlases", {})) as Listed);
  const shown = shownOf(listed, text, before);
  const atlases = shown.map(({ number, name }) => ({ name, source: new MessageSource(messages, number) }));
  if (!listed.rerun) return { atlases };
  const noEffects = "A notebook shows records: regard explore --model FOLDER “a sentence” has the model, too.";
  const rerun = async (text: string): Promise<Collection> => {
    checkLength(text, listed.rerun);
    return told(messages, text, (await messages.ask("rerun", { text })) as Listed, shown[0]);
  };
  return { atlases, rerun, noEffects };
}

/** One atlas. */
export class MessageSource implements Source {
  constructor(
    private readonly messages: Messages,
    private readonly atlas: number,
  ) {}

  async meta(): Promise<Meta> {
    return checkedMeta(await this.ask("meta", {}));
  }

  async tokens(map: number, side: Side, start: number, stop: number, signal?: AbortSignal): Promise<string[]> {
    return (await this.ask("tokens", { map, side, start, stop }, signal)) as string[];
  }

  pooled(map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array> {
    return this.ask("pooled", { map, head, level, reduce }, signal) as Promise<Float32Array>;
  }

  overview(map: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array> {
    return this.ask("overview", { map, reduce }, signal) as Promise<Float32Array>;
  }

  weights(map: number, head: number, region: Region, signal?: AbortSignal): Promise<Float32Array> {
    const rows = [region.row0, region.row1];
    const columns = [region.column0, region.column1];
    return this.ask("weights", { map, head, rows, columns }, signal) as Promise<Float32Array>;
  }

  profile(map: number, head: number, which: string, signal?: AbortSignal): Promise<Float32Array> {
    return this.ask("profile", { map, head, which }, signal) as Promise<Float32Array>;
  }

  top(map: number, head: number, asked: TopQuery, signal?: AbortSignal): Promise<TopList> {
    return this.ask("top", { map, head, ...asked }, signal) as Promise<TopList>;
  }

  norms(map: number, head: number, signal?: AbortSignal): Promise<Float32Array> {
    return this.ask("norms", { map, head }, signal) as Promise<Float32Array>;
  }

  pooledContributions(map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal): Promise<Float32Array> {
    return this.ask("pooled_contributions", { map, head, level, reduce }, signal) as Promise<Float32Array>;
  }

  kept(map: number, kept: Kept, by: Measure, signal?: AbortSignal): Promise<Float32Array> {
    const sides = { queries: sideText(kept.query), keys: sideText(kept.key) };
    return this.ask("kept", { map, ...sides, by }, signal) as Promise<Float32Array>;
  }

  compares(other: Source): boolean {
    return other instanceof MessageSource;
  }

  async changes(other: Source, map: number, kept: Kept, signal?: AbortSignal): Promise<HeadValue[]> {
    const sides = { queries: sideText(kept.query), keys: sideText(kept.key) };
    const found = await this.ask("changes", { other: (other as MessageSource).atlas, map, ...sides }, signal);
    return (found as { heads: HeadValue[] }).heads;
  }

  private ask(method: string, args: Arguments, signal?: AbortSignal): Promise<unknown> {
    return this.messages.ask(method, { atlas: this.atlas, ...args }, signal);
  }
}

/** A copy, since a view of a message's buffer need not start at a multiple of four. */
function float32(buffer: ArrayBuffer | ArrayBufferView): Float32Array {
  const bytes = ArrayBuffer.isView(buffer)
    ? new Uint8Array(buffer.buffer as ArrayBuffer, buffer.byteOffset, buffer.byteLength)
    : new Uint8Array(buffer);
  return new Float32Array(bytes.slice().buffer);
}
