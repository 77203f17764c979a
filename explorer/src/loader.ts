/** A bounded cache of loaded data, with requests that are cancelled once no view needs them. */

type Load<T> = (signal: AbortSignal) => Promise<T>;

/** Gives what is there already, else undefined and sees to it that it comes. */
export type Need = <T>(key: string, load: Load<T>) => T | undefined;

interface Wish {
  load: Load<unknown>;
  owners: Set<object>;
}

interface Running extends Wish {
  controller: AbortController;
}

const RETRY_AFTER = 4000;

export class Loader {
  private readonly kept = new Map<string, { value: unknown; bytes: number }>();
  private readonly waiting = new Map<string, Wish>();
  private readonly running = new Map<string, Running>();
  private readonly failed = new Map<string, number>();
  private readonly listeners = new Set<(key: string) => void>();
  private bytes = 0;
  /** The last failure in words, for the status line. */
  error = "";
  /** Tallies for tests and the status line. */
  readonly counts = { asked: 0, dropped: 0, evicted: 0 };

  constructor(
    private readonly limit = 64e6,
    private readonly parallel = 6,
  ) {}

  get held(): number {
    return this.bytes;
  }

  get busy(): number {
    return this.running.size + this.waiting.size;
  }

  listen(listener: (key: string) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** What is kept under a key; it counts as used now. */
  peek<T>(key: string): T | undefined {
    const found = this.kept.get(key);
    if (!found) return undefined;
    this.kept.delete(key);
    this.kept.set(key, found);
    return found.value as T;
  }

  /**
   * One look of `owner` at what it shows: `look` is called with `need`; whatever the owner wished for before and does
   * not ask for now is dropped, and its request aborted if nobody else waits for it.
   */
  frame<T>(owner: object, look: (need: Need) => T): T {
    const wanted = new Map<string, Load<unknown>>();
    const need: Need = (key, load) => {
      const found = this.peek<never>(key);
      if (found === undefined) wanted.set(key, load);
      return found;
    };
    const result = look(need);
    this.drop(owner, wanted);
    for (const [key, load] of wanted) this.wish(owner, key, load);
    this.start();
    return result;
  }

  /** Everything that `owner` waits for is no longer wanted. */
  release(owner: object): void {
    this.drop(owner, new Map());
    this.start();
  }

  /** The value, now or later; for what is asked once, such as a search through all tokens. */
  async once<T>(key: string, load: Load<T>, signal?: AbortSignal): Promise<T> {
    const found = this.peek<T>(key);
    if (found !== undefined) return found;
    const value = await load(signal ?? new AbortController().signal);
    this.keep(key, value);
    return value;
  }

  clear(): void {
    for (const running of this.running.values()) running.controller.abort();
    for (const held of [this.kept, this.waiting, this.running, this.failed]) held.clear();
    this.bytes = 0;
  }

  private wish(owner: object, key: string, load: Load<unknown>): void {
    const failed = this.failed.get(key);
    if (failed !== undefined && performance.now() - failed < RETRY_AFTER) return;
    const there = this.running.get(key) ?? this.waiting.get(key);
    if (there) there.owners.add(owner);
    else this.waiting.set(key, { load, owners: new Set([owner]) });
  }

  private drop(owner: object, wanted: Map<string, unknown>): void {
    for (const wishes of [this.waiting, this.running] as Map<string, Wish>[]) {
      for (const [key, wish] of wishes) {
        if (wanted.has(key) || !wish.owners.delete(owner) || wish.owners.size > 0) continue;
        wishes.delete(key);
        (wish as Partial<Running>).controller?.abort();
        this.counts.dropped += 1;
      }
    }
  }

  private start(): void {
    for (const [key, wish] of this.waiting) {
      if (this.running.size >= this.parallel) return;
      this.waiting.delete(key);
      const running = { ...wish, controller: new AbortController() };
      this.running.set(key, running);
      this.counts.asked += 1;
      void this.follow(key, running);
    }
  }

  private async follow(key: string, running: Running): Promise<void> {
    try {
      const value = await running.load(running.controller.signal);
      if (this.running.get(key) !== running) return;
      this.keep(key, value);
      this.failed.delete(key);
      this.error = "";
    } catch (error) {
      if (this.running.get(key) !== running) return;
      this.failed.set(key, performance.now());
      this.error = error instanceof Error ? error.message : String(error);
    }
    this.running.delete(key);
    this.start();
    for (const listener of [...this.listeners]) listener(key);
  }

  private keep(key: string, value: unknown): void {
    const bytes = sizeOf(value);
    this.bytes += bytes - (this.kept.get(key)?.bytes ?? 0);
    this.kept.delete(key);
    this.kept.set(key, { value, bytes });
    for (const [old, { bytes: freed }] of this.kept) {
      if (this.bytes <= this.limit || old === key) break;
      this.kept.delete(old);
      this.bytes -= freed;
      this.counts.evicted += 1;
    }
  }
}

function sizeOf(value: unknown): number {
  if (ArrayBuffer.isView(value)) return value.byteLength + 64;
  if (Array.isArray(value)) return value.reduce((sum: number, item) => sum + 2 * String(item).length + 32, 64);
  return 64;
}
