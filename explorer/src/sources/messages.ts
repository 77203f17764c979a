/** The source of a notebook: requests and answers as messages, numbers as binary buffers. */

import { checkedMeta, type Meta, type Reduce, type Region, type Side, type Source } from "../types.ts";

/** {id, method, arguments} goes out; {id, result} or {id, error} comes back; numbers come as one buffer. */
export interface Channel {
  send(message: { id: number; method: string; arguments: Record<string, unknown> }): void;
  listen(listener: (message: Answer, buffers: readonly (ArrayBuffer | ArrayBufferView)[]) => void): void;
}

export interface Answer {
  id: number;
  result?: unknown;
  error?: string;
}

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
}

export class MessageSource implements Source {
  private readonly waiting = new Map<number, Waiting>();
  private next = 1;
  rerun?: (text: string) => Promise<void>;

  constructor(
    private readonly channel: Channel,
    canRerun = false,
  ) {
    channel.listen((answer, buffers) => this.settle(answer, buffers));
    if (canRerun) this.rerun = async (text) => void (await this.ask("rerun", { text }));
  }

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
    const { row0, row1, column0, column1 } = region;
    return this.ask("weights", { map, head, row0, row1, column0, column1 }, signal) as Promise<Float32Array>;
  }

  profile(map: number, head: number, which: string, signal?: AbortSignal): Promise<Float32Array> {
    return this.ask("profile", { map, head, which }, signal) as Promise<Float32Array>;
  }

  private ask(method: string, args: Record<string, unknown>, signal?: AbortSignal): Promise<unknown> {
    const id = this.next;
    this.next += 1;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        this.waiting.delete(id);
        reject(new Error("no longer wanted"));
      });
      this.channel.send({ id, method, arguments: args });
    });
  }

  private settle(answer: Answer, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void {
    const waiting = this.waiting.get(answer.id);
    if (!waiting) return;
    this.waiting.delete(answer.id);
    if (answer.error !== undefined) waiting.reject(new Error(answer.error));
    else waiting.resolve(buffers.length ? float32(buffers[0]) : answer.result);
  }
}

/** A copy, since a view of a message's buffer need not start at a multiple of four. */
function float32(buffer: ArrayBuffer | ArrayBufferView): Float32Array {
  const bytes = ArrayBuffer.isView(buffer)
    ? new Uint8Array(buffer.buffer as ArrayBuffer, buffer.byteOffset, buffer.byteLength)
    : new Uint8Array(buffer);
  return new Float32Array(bytes.slice().buffer);
}
