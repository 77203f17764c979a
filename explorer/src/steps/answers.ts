/** What the live page of steps asks for and gets: requests, answers, and where they come from. */

import { inflatedText } from "../sources/arrays.ts";

/** A text; where a number changed, its text and that of the number before. */
export type Cell = string | [string, string];

export interface Bilingual {
  en: string;
  ko: string;
}

export interface StepTable {
  key: string;
  title: Bilingual;
  formula: string;
  /** Names; where features are left out, how many. */
  columns: (string | number)[];
  /** Null where features are left out. */
  rows: { name: string; cells: (Cell | null)[] }[];
  /** Whether a class computes from it, and does not predict it. */
  given: boolean;
  sums?: "rows" | "columns";
  totals?: (Cell | null)[];
  example?: string;
  note?: Bilingual;
}

/** Words, keys and source words are counted from 1; a layer of null is the last, a head of null all of them. */
export interface StepRequest {
  mechanism: string;
  sentence: string;
  word: number;
  kind: string;
  layer: number | null;
  head: number | null;
  source_word: number;
  changes: string[];
}

/** A worked example has a title, perhaps a note, and no sentence, translation or places. */
export interface Answer {
  title?: Bilingual;
  note?: Bilingual;
  tables: StepTable[];
  command: string;
  sentence?: string;
  translation?: string;
  source?: string[];
  target?: string[];
  warnings?: string[];
  places?: Record<string, [number, number]>;
  request?: StepRequest;
  /** Of a worked example: its queries, where changes are made in the row of one. */
  queries?: string[];
  keys?: string[];
  attends?: boolean[];
  attended?: boolean[];
  scores?: string[];
  scaled?: boolean;
  /** Whether numbers can be added to scores, and whether a masked key is so for all queries. */
  adds?: boolean;
  drops?: boolean;
  next?: { word: string; probability: string }[];
  left_out?: Bilingual[];
}

export interface Named {
  name: string;
  title: Bilingual;
}

export interface Options {
  mechanisms: (Named & { sentence: string; reads: string })[];
  examples: Named[];
}

export interface StepSource {
  /** Whether it answers any request, and not only those that were computed before. */
  live: boolean;
  /** Whether there is an answer. */
  has(request: StepRequest): boolean;
  options(): Promise<Options>;
  /** Rejects with an Error whose message is for the reader; `NotComputed` where a page without a server has no answer. */
  answer(request: StepRequest): Promise<Answer>;
}

/** A request that a page without a server has no answer to. */
export class NotComputed extends Error {}

/** Asks the server that the page is from. */
export class ServedSteps implements StepSource {
  readonly live = true;
  constructor(private readonly address: string) {}

  has(): boolean {
    return true;
  }

  async options(): Promise<Options> {
    return (await this.json("options")) as Options;
  }

  async answer(request: StepRequest): Promise<Answer> {
    const { mechanism, word, changes } = request;
    const body = mechanism.startsWith("example:") ? { mechanism, word, changes } : request;
    return (await this.json("answer", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    })) as Answer;
  }

  private async json(path: string, settings: RequestInit = {}): Promise<unknown> {
    let response: Response;
    try {
      response = await fetch(new URL(path, this.address), settings);
    } catch {
      throw new Error("The server does not answer: start `regard steps --serve` again, and open its new address.");
    }
    const value = (await response.json().catch(() => ({ error: `the server answered ${response.status}` }))) as {
      error?: string;
    };
    if (!response.ok) throw new Error(value.error ?? `the server answered ${response.status}`);
    return value;
  }
}

/** An answer of a page without a server: of a table what differs from the one without the change, or its key alone. */
export type StoredAnswer = Omit<Answer, "tables"> & { tables: ((Partial<StepTable> & { key: string }) | string)[] };

export interface StoredSteps {
  options: Options;
  answers: Record<string, StoredAnswer>;
  opening: string;
}

/** What a page has embedded: the answers as JSON through gzip. */
export type EmbeddedData = Omit<StoredSteps, "answers"> & { answers: string };

/** Answers from the page itself, which has some words and single changes of one sentence. */
export class EmbeddedSteps implements StepSource {
  readonly live = false;
  constructor(private readonly stored: StoredSteps) {}

  static async read(data: EmbeddedData): Promise<EmbeddedSteps> {
    return new EmbeddedSteps({ ...data, answers: JSON.parse(await inflatedText(data.answers)) });
  }

  has(request: StepRequest): boolean {
    return answerKey(request) in this.stored.answers;
  }

  async options(): Promise<Options> {
    return this.stored.options;
  }

  async answer(request: StepRequest): Promise<Answer> {
    const trained = this.stored.answers[String(request.word)] as Answer | undefined;
    const found = this.stored.answers[answerKey(request)];
    if (!found || !trained) throw new NotComputed();
    return merged(found, trained);
  }
}

function answerKey({ word, changes }: StepRequest): string {
  return [word, ...changes].join(" ");
}

/** The answer to a change with what it shares with that of no change. */
export function merged(found: StoredAnswer, trained: Answer): Answer {
  const before = new Map(trained.tables.map((table) => [table.key, table]));
  const tables = found.tables.map((table) =>
    typeof table === "string" ? (before.get(table) as StepTable) : ({ ...before.get(table.key), ...table } as StepTable),
  );
  return { ...trained, ...found, tables };
}
