/** What the live page of steps asks for and gets: requests, answers, and where they come from. */

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

/** A worked example has title, tables and command alone. */
export interface Answer {
  title?: Bilingual;
  tables: StepTable[];
  command: string;
  sentence?: string;
  translation?: string;
  source?: string[];
  target?: string[];
  warnings?: string[];
  places?: Record<string, [number, number]>;
  request?: StepRequest;
  keys?: string[];
  attends?: boolean[];
  attended?: boolean[];
  scores?: string[];
  scaled?: boolean;
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

  async options(): Promise<Options> {
    return (await this.json("options")) as Options;
  }

  async answer(request: StepRequest): Promise<Answer> {
    const body = request.mechanism.startsWith("example:") ? { mechanism: request.mechanism } : request;
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

/** An answer of a page without a server; a table that is as without the change is named by its key. */
export type StoredAnswer = Omit<Answer, "tables"> & { tables: (StepTable | string)[] };

export interface StoredSteps {
  options: Options;
  answers: Record<string, StoredAnswer>;
  opening: string;
}

/** Answers from the page itself, which has some words and single changes of one sentence. */
export class EmbeddedSteps implements StepSource {
  readonly live = false;
  constructor(private readonly stored: StoredSteps) {}

  async options(): Promise<Options> {
    return this.stored.options;
  }

  async answer(request: StepRequest): Promise<Answer> {
    const trained = this.stored.answers[String(request.word)] as Answer | undefined;
    const found = this.stored.answers[[request.word, ...request.changes].join(" ")];
    if (!found || !trained) throw new NotComputed();
    return merged(found, trained);
  }
}

/** The answer to a change with what it shares with that of no change. */
export function merged(found: StoredAnswer, trained: Answer): Answer {
  const tables = found.tables.map((table) =>
    typeof table === "string" ? (trained.tables.find(({ key }) => key === table) as StepTable) : table,
  );
  return { ...trained, ...found, tables };
}
