/** The dialog that goes to an index, a cell or a token. */

import { type Context, present } from "./context.ts";
import { openDialog } from "./dialogs.ts";
import { button, make, replace, select } from "./dom.ts";
import { MOST_KEPT } from "./kept.ts";
import type { PhraseMatch } from "./phrases.ts";
import { visible, whole } from "./text.ts";
import type { Side } from "./types.ts";

type Target = { cell: [number, number] } | { index: number } | { find: string };

/** What a text asks for: a cell, an index, or tokens that hold it. */
export function parseGoTo(text: string): Target | undefined {
  const pair = /^\s*(\d+)\s*[, ]\s*(\d+)\s*$/.exec(text);
  if (pair) return { cell: [Number(pair[1]), Number(pair[2])] };
  if (/^\s*\d+\s*$/.test(text)) return { index: Number(text) };
  return text === "" ? undefined : { find: text };
}

const PAUSE = 120;
/** So many tokens of a phrase are shown. */
const MOST_SHOWN = 8;

const SIDES = [
  { value: "query", label: "queries" },
  { value: "key", label: "keys" },
];

export class GoTo {
  private side: Side = "query";
  private search = new AbortController();
  private timer = 0;
  private readonly map: number;
  private readonly results = make("ol", { class: "results", set: { "aria-label": "matches" } });
  private readonly told = make(
    "p",
    { class: "muted", set: { role: "status" } },
    "An index, “query, key”, a part of a token, or a phrase.",
  );
  private readonly input = make("input", {
    set: { type: "text", "aria-label": "index, token or phrase", spellcheck: "false" },
    on: { input: () => this.later() },
  });
  private readonly dialog: HTMLDialogElement;

  /** `go` is told a query, a key, or both. */
  constructor(
    private readonly context: Context,
    root: HTMLElement,
    private readonly go: (row: number | undefined, column: number | undefined) => void,
  ) {
    this.map = context.state().map;
    const sides = select("in", SIDES, this.side, (side) => {
      this.side = side as Side;
      void this.look();
    });
    const submit = (event: Event) => {
      event.preventDefault();
      this.submit();
    };
    const form = make("form", { on: { submit } }, this.input, sides, make("button", { set: { type: "submit" } }, "Go"));
    this.dialog = openDialog(root, "Go to and keep", form, this.told, this.results);
    this.dialog.addEventListener("close", () => this.search.abort());
    this.input.focus();
  }

  private later(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.look(), PAUSE);
  }

  private async look(): Promise<void> {
    this.search.abort();
    this.search = new AbortController();
    const { signal } = this.search;
    const wanted = parseGoTo(this.input.value);
    replace(this.results);
    if (!wanted || !("find" in wanted)) return;
    this.told.textContent = "searching …";
    const found = await this.context.tokens.find(this.map, this.side, wanted.find, signal).catch(() => undefined);
    if (!found || signal.aborted) return;
    const count = `${found.matches.length} ${found.matches.length === 1 ? "match" : "matches"}`;
    this.told.textContent = found.matches.length
      ? `${found.more ? "the first " : ""}${count}`
      : "no token holds this text, nor do several together";
    replace(this.results, ...found.matches.map((match) => this.match(match)));
  }

  private match({ first, last }: PhraseMatch): HTMLElement {
    const need = present(this.context.loader);
    const shown = Array.from({ length: Math.min(last - first + 1, MOST_SHOWN) }, (_, at) =>
      visible(this.context.tokens.at(need, this.map, this.side, first + at) ?? "…"),
    );
    const numbers = first === last ? whole(first) : `${whole(first)}–${whole(last)}`;
    const words = `${shown.join(" ")}${last - first + 1 > MOST_SHOWN ? " …" : ""}`;
    return make(
      "li",
      {},
      button(`${numbers}  ${words}`, () => this.take(first, last)),
    );
  }

  /** Of a phrase all tokens are kept, as far as there is room. */
  private take(index: number, last = index): void {
    this.dialog.close();
    this.go(this.side === "query" ? index : undefined, this.side === "key" ? index : undefined);
    if (last === index) return;
    const all = Array.from({ length: Math.min(last - index + 1, MOST_KEPT) }, (_, at) => index + at);
    this.context.update({ at: { ...this.context.state().at, [this.side]: all } });
  }

  private submit(): void {
    const wanted = parseGoTo(this.input.value);
    const { queries, keys } = this.context.meta.maps[this.map];
    if (wanted && "cell" in wanted && wanted.cell[0] < queries && wanted.cell[1] < keys) {
      this.dialog.close();
      this.go(...wanted.cell);
    } else if (wanted && "index" in wanted && wanted.index < (this.side === "query" ? queries : keys)) {
      this.take(wanted.index);
    } else if (wanted && "find" in wanted) this.results.querySelector("button")?.click();
    else this.told.textContent = `There are ${whole(queries)} queries and ${whole(keys)} keys; the first is 0.`;
  }
}
