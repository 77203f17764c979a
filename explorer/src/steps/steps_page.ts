/** The live page: its controls, the request that they make, and the tables of the answer. */

import { button, type Choice, make, replace, select } from "../dom.ts";
import { browserScheme, framedScheme, type Scheme } from "../scheme.ts";
import { type Answer, NotComputed, type Options, type StepSource } from "./answers.ts";
import { Covers } from "./covers.ts";
import { Guesses, textOf } from "./guesses.ts";
import { decodeState, encodeState, type PageState, REQUEST, SIZES } from "./page_state.ts";
import { type Say, saying } from "./page_words.ts";
import { shownToken, stepNumber, tableSection } from "./table_view.ts";
import { WhatIfPanel } from "./what_if_panel.ts";

/** The type's size at first: a projector's, a phone's on a phone, and that of small print in a frame. */
function firstSize(framed: boolean): number {
  if (framed) return 0;
  return matchMedia("(max-width: 700px)").matches ? 1 : 3;
}

export class StepsPage {
  private state: PageState;
  private readonly size: number;
  private answer?: Answer;
  private covers = new Covers([], false);
  private guesses = new Guesses();
  private error = "";
  /** Requests are made one at a time; of those that come meanwhile the last is made. */
  private busy = false;
  private again = false;
  private readonly scheme: Scheme;
  private readonly panel: WhatIfPanel;
  private readonly header = make("header", { class: "top" });
  private readonly words = make("div", { class: "words" });
  private readonly message = make("div", { class: "message", set: { role: "alert" } });
  private readonly status = make("p", { class: "status", set: { role: "status" } });
  private readonly next = make("p", { class: "next" });
  private readonly steps = make("nav", { class: "steps" });
  private readonly tables = make("div", { class: "tables" });
  private readonly foot = make("footer");
  /** Sentences by the language that a mechanism reads, so that going from one to the other keeps both. */
  private readonly sentences = new Map<string, string>();

  constructor(
    private readonly root: HTMLElement,
    private readonly source: StepSource,
    private readonly options: Options,
    opening: string,
  ) {
    const { framed } = decodeState(opening, 0);
    this.size = firstSize(framed);
    this.state = decodeState(opening, this.size);
    this.scheme = framed ? framedScheme() : browserScheme();
    this.panel = new WhatIfPanel(
      source.live,
      (changes) => source.has({ ...this.state.request, changes }),
      (changes) => this.ask({ changes }),
    );
    const { request } = this.state;
    const names = [...options.mechanisms, ...options.examples].map(({ name }) => name);
    if (!request.mechanism || (request.mechanism !== "" && names.length === 0)) request.mechanism = names[0] ?? "";
    this.remember();
    if (!request.sentence) request.sentence = this.mechanism?.sentence ?? "";
    this.scheme.watch(() => this.paint());
    document.addEventListener("keydown", (event) => this.press(event));
    window.addEventListener("hashchange", () => {
      if (location.hash.slice(1) === this.hash) return;
      this.state = decodeState(location.hash, this.size);
      void this.load();
    });
    const aside = make("aside", {}, this.next, this.panel.element);
    replace(
      root,
      this.header,
      make(
        "main",
        {},
        this.message,
        this.words,
        this.status,
        make("div", { class: "columns" }, aside, make("div", { class: "shown" }, this.steps, this.tables)),
        this.foot,
      ),
    );
    root.classList.toggle("framed", framed);
    if (framed) this.tellHeight();
    this.paint();
    void this.load();
  }

  /** Says to the page around how high this one is, now and whenever that changes. */
  private tellHeight(): void {
    const tell = () => window.parent.postMessage({ regardHeight: Math.ceil(this.root.getBoundingClientRect().height) }, "*");
    new ResizeObserver(tell).observe(this.root);
  }

  private get say(): Say {
    return saying(this.state.language);
  }

  private get hash(): string {
    return encodeState(this.state, this.size);
  }

  private get mechanism() {
    return this.options.mechanisms.find(({ name }) => name === this.state.request.mechanism);
  }

  private remember(): void {
    const { sentence } = this.state.request;
    if (this.mechanism && sentence) this.sentences.set(this.mechanism.reads, sentence);
  }

  /** Changes the request, and asks for its answer. */
  private ask(change: Partial<PageState["request"]>): void {
    this.state.request = { ...this.state.request, ...change };
    this.remember();
    void this.load();
  }

  private chooseMechanism(name: string): void {
    const reads = this.mechanism?.reads;
    this.state.request = { ...REQUEST, mechanism: name, sentence: this.state.request.sentence };
    const chosen = this.mechanism;
    if (chosen && chosen.reads !== reads)
      this.state.request.sentence = this.sentences.get(chosen.reads) ?? chosen.sentence;
    void this.load();
  }

  private async load(): Promise<void> {
    this.paintHeader();
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    this.root.setAttribute("aria-busy", "true");
    do {
      this.again = false;
      const request = this.state.request;
      const slow = window.setTimeout(() => (this.status.textContent = this.say("computing")), 300);
      try {
        const answer = await this.source.answer(request);
        if (!this.again) this.show(answer);
      } catch (error) {
        if (!this.again) this.fail(error);
      }
      clearTimeout(slow);
    } while (this.again);
    this.busy = false;
    this.root.removeAttribute("aria-busy");
    this.write();
  }

  private show(answer: Answer): void {
    this.answer = answer;
    this.error = "";
    this.covers = new Covers(answer.tables, this.state.predict);
    this.guesses = new Guesses();
    this.paint();
  }

  private fail(error: unknown): void {
    const command = this.answer?.command ?? "regard steps";
    this.error =
      error instanceof NotComputed ? this.say("notComputed", `${command} --serve`) : (error as Error).message;
    this.paintMessage();
    this.paintPanel();
    this.status.textContent = "";
  }

  /** The state stands in the address, where there is one. */
  private write(): void {
    try {
      if (location.hash.slice(1) !== this.hash) history.replaceState(null, "", `#${this.hash}`);
    } catch {
      // A frame in a sandbox has no address of its own.
    }
  }

  private paint(): void {
    const { language, theme, size } = this.state;
    this.root.dataset.theme = theme || (this.scheme.dark() ? "dark" : "light");
    document.documentElement.lang = language;
    document.documentElement.style.fontSize = `${SIZES[size]}px`;
    this.paintHeader();
    this.paintMessage();
    this.paintWords();
    this.paintTables();
    this.paintPanel();
    this.paintFoot();
  }

  private change(change: Partial<PageState>): void {
    this.state = { ...this.state, ...change };
    this.paint();
    this.write();
  }

  private paintHeader(): void {
    const { say, state } = this;
    const { language, request } = state;
    // What is typed stays while an answer arrives.
    const typing = this.header.querySelector<HTMLInputElement>("input[name=sentence]");
    const focused = document.activeElement instanceof HTMLElement ? (document.activeElement.dataset.control ?? "") : "";
    const input = make("input", {
      set: {
        name: "sentence",
        type: "text",
        "data-control": "sentence",
        readonly: !this.source.live,
        autocomplete: "off",
        spellcheck: "false",
        maxlength: 1000,
        "aria-label": say("sentence"),
      },
    });
    input.value = typing && document.activeElement === typing ? typing.value : request.sentence;
    const form = make(
      "form",
      {
        on: {
          submit: (event) => {
            event.preventDefault();
            this.ask({ sentence: input.value, word: 1, source_word: 1, changes: [] });
          },
        },
      },
      input,
      this.source.live && make("button", { set: { "data-control": "translate" } }, say("translate")),
    );
    const isExample = request.mechanism.startsWith("example:");
    const choice = this.mechanismChoice();
    const press = (label: string, act: () => void, pressed: boolean, control: string, set = {}) =>
      button(label, act, { set: { "aria-pressed": String(pressed), "data-control": control, ...set } });
    const dark = this.root.dataset.theme === "dark";
    replace(
      this.header,
      make("h1", {}, say("title")),
      make(
        "div",
        { class: "looks" },
        make(
          "div",
          { class: "group", set: { role: "group", "aria-label": say("language") } },
          press("English", () => this.change({ language: "en" }), language === "en", "en", { lang: "en" }),
          press("한국어", () => this.change({ language: "ko" }), language === "ko", "ko", { lang: "ko" }),
        ),
        make(
          "div",
          { class: "group", set: { role: "group", "aria-label": `${say("smaller")}, ${say("larger")}` } },
          this.sizeButton("A−", say("smaller"), -1),
          this.sizeButton("A+", say("larger"), 1),
        ),
        button(dark ? say("light") : say("dark"), () => this.change({ theme: dark ? "light" : "dark" }), {
          set: { "data-control": "theme" },
        }),
        press(say("predict"), () => this.predict(!state.predict), state.predict, "predict", { class: "predict" }),
      ),
      choice,
      isExample ? undefined : form,
      ...(isExample ? [] : this.placeChoices()),
    );
    if (focused) this.header.querySelector<HTMLElement>(`[data-control="${focused}"]`)?.focus();
  }

  private sizeButton(text: string, label: string, by: 1 | -1): HTMLButtonElement {
    const size = this.state.size + by;
    return button(text, () => this.change({ size }), {
      set: { title: label, disabled: !(size in SIZES), "data-control": `size${by}` },
    });
  }

  private mechanismChoice(): HTMLElement {
    const { language, request } = this.state;
    const label = select(this.say("mechanism"), [], "", (value) => this.chooseMechanism(value));
    const box = label.querySelector("select") as HTMLSelectElement;
    box.dataset.control = "mechanism";
    const groups = [
      [this.say("translators"), this.options.mechanisms],
      [this.say("examples"), this.options.examples],
    ] as const;
    for (const [name, entries] of groups) {
      if (!entries.length) continue;
      const options = entries.map((one) =>
        make("option", { set: { value: one.name } }, one.title[language] || one.title.en),
      );
      box.append(make("optgroup", { set: { label: name } }, ...options));
    }
    box.value = request.mechanism;
    label.classList.add("mechanism");
    return label;
  }

  /** Which attention of a Transformer. */
  private placeChoices(): HTMLElement[] {
    const { say } = this;
    const places = this.answer?.places ?? {};
    const { kind, layer, head } = this.answer?.request ?? this.state.request;
    if (!this.source.live || !(kind in places)) return [];
    const [layers, heads] = places[kind];
    const numbers = (count: number): Choice[] =>
      Array.from({ length: count }, (_, at) => ({ value: String(at), label: String(at + 1) }));
    const kinds = (["cross", "self", "encoder"] as const).map((value) => ({ value, label: say(value) }));
    const chosen = [
      select(say("kind"), kinds, kind, (value) => this.ask({ kind: value, layer: null, changes: [] })),
      select(say("layer"), numbers(layers), String(layer), (value) => this.ask({ layer: Number(value) })),
    ];
    if (this.state.request.mechanism === "checkpoint" || head !== null) {
      const all = this.state.request.mechanism === "checkpoint" ? [{ value: "all", label: say("allHeads") }] : [];
      const value = head === null ? "all" : String(head);
      const change = (to: string) => this.ask({ head: to === "all" ? null : Number(to) });
      chosen.push(select(say("head"), [...numbers(heads), ...all], value, change));
    }
    chosen.forEach((label, at) => ((label.querySelector("select") as HTMLElement).dataset.control = `place${at}`));
    return chosen;
  }

  private paintMessage(): void {
    const said = this.error ? [this.error] : (this.answer?.warnings ?? []);
    replace(this.message, ...said.map((text) => make("p", {}, text)));
    this.root.classList.toggle("failed", this.error !== "");
  }

  /** The sentence and its translation: the word to predict is chosen there. */
  private paintWords(): void {
    const { say, answer } = this;
    const request = answer?.request;
    const group = (name: string, nodes: Node[]) =>
      make("div", { class: "line", set: { role: "group", "aria-label": name } }, make("span", { class: "label" }, name), ...nodes);
    if (!answer?.target || !answer.source || !request) {
      const title = answer?.title?.[this.state.language] || answer?.title?.en;
      const note = answer?.note?.[this.state.language] || answer?.note?.en;
      const { queries = [] } = answer ?? {};
      const focused = (document.activeElement as HTMLElement | null)?.dataset.control ?? "";
      const buttons = queries.map((query, at) =>
        this.wordButton(query, at + 1 === request?.word, { word: at + 1, changes: [] }, `word${at}`),
      );
      replace(
        this.words,
        title ? make("p", { class: "example-title" }, title) : undefined,
        note ? make("p", {}, note) : undefined,
        queries.length > 1 && group(say("query"), buttons),
      );
      if (/^word\d/.test(focused)) this.words.querySelector<HTMLElement>(`[data-control=${focused}]`)?.focus();
      return;
    }
    const encoder = request.kind === "encoder";
    const source = answer.source.map((token, at) =>
      encoder
        ? this.wordButton(token, at + 1 === request.source_word, { source_word: at + 1 }, `source${at}`)
        : make("span", { class: "token" }, token),
    );
    // The word that is predicted, and those after it, are not said before.
    const covered = this.covers.any("prediction");
    const target = answer.target.map((token, at) => {
      const text = covered && at + 1 >= request.word ? "?" : shownToken(token, say);
      const change = { word: at + 1, ...(request.kind === "self" ? { changes: [] } : {}) };
      return this.wordButton(text, at + 1 === request.word, change, `word${at}`, String(at + 1));
    });
    const focused = (document.activeElement as HTMLElement | null)?.dataset.control ?? "";
    replace(
      this.words,
      group(encoder ? say("ofWord") : say("source"), source),
      group(say("word"), target),
    );
    if (/^(word|source)\d/.test(focused)) this.words.querySelector<HTMLElement>(`[data-control=${focused}]`)?.focus();
  }

  private wordButton(
    text: string,
    pressed: boolean,
    change: Partial<PageState["request"]>,
    control: string,
    number = "",
  ): HTMLButtonElement {
    const set = {
      "aria-pressed": String(pressed),
      "data-control": control,
      "aria-label": number ? `${number}: ${text}` : undefined,
    };
    return button(text, () => this.ask(change), { class: "token", set });
  }

  private paintTables(): void {
    const { answer, say } = this;
    if (!answer) return;
    const { language } = this.state;
    const look = {
      language,
      say,
      covers: this.covers,
      hit: (id: string) => this.guesses.of(id),
      reveal: (id: string) => this.reveal(id),
      revealTable: (table: string) => this.revealTable(table),
    };
    const scrolled = new Map(
      [...this.tables.querySelectorAll<HTMLElement>(".scroller")].map((box) => [box.parentElement?.id, box.scrollLeft]),
    );
    replace(this.tables, ...answer.tables.map((table) => tableSection(table, look)));
    for (const box of this.tables.querySelectorAll<HTMLElement>(".scroller"))
      box.scrollLeft = scrolled.get(box.parentElement?.id) ?? 0;
    const changes = this.state.request.changes.length > 0;
    const lost = (answer.left_out ?? []).map((title) => title[language] || title.en);
    this.status.textContent = [changes && say("marked"), lost.length > 0 && say("leftOut", lost.join(", "))]
      .filter(Boolean)
      .join(" ");
    const numbered = answer.tables.filter(({ title }) => stepNumber(title.en));
    this.steps.setAttribute("aria-label", say("steps"));
    replace(
      this.steps,
      ...numbered.map((table) => {
        const title = table.title[language] || table.title.en;
        const go = () => {
          const section = document.getElementById(`step-${table.key}`);
          section?.scrollIntoView();
          section?.querySelector<HTMLElement>("h2")?.focus({ preventScroll: true });
        };
        return button(stepNumber(title), go, { set: { "aria-label": title, title } });
      }),
      this.state.predict &&
        make(
          "span",
          { class: "covering" },
          this.predictionForm(),
          button(say("revealAll"), () => this.reveals(() => this.covers.revealAll()), {
            set: { disabled: this.covers.left === 0 },
          }),
          button(say("coverAgain"), () => this.predict(true)),
          make("span", { class: "muted" }, say("keys")),
        ),
    );
    this.steps.hidden = this.steps.childElementCount === 0;
  }

  private paintPanel(): void {
    const { answer, say } = this;
    this.next.hidden = this.panel.element.hidden = !answer;
    if (!answer) return;
    const weights = answer.tables.find(({ key }) => key === "weights");
    const row = weights?.rows[answer.queries?.length ? this.state.request.word - 1 : 0]?.cells ?? [];
    const texts = this.covers.any("weights") ? [] : row.map((cell) => (Array.isArray(cell) ? cell[0] : (cell ?? "")));
    this.panel.show(answer, this.state.request.changes, say, texts);
    const [before, after] = answer.next ?? [];
    this.next.hidden = !before;
    if (!before) return;
    const covered = this.covers.any("prediction");
    const shown = (one: typeof before) =>
      make("span", { class: "word" }, shownToken(one.word, say), " ", make("small", {}, one.probability));
    const verdict = after && (after.word === before.word ? say("stays") : say("changes"));
    replace(
      this.next,
      make("span", { class: "label" }, say("next")),
      covered ? make("span", { class: "word" }, "?") : shown(before),
      ...(after && !covered
        ? [
            make("span", { set: { "aria-hidden": "true" } }, "→"),
            shown(after),
            make("span", { class: after.word === before.word ? "verdict" : "verdict changes" }, verdict ?? ""),
          ]
        : []),
    );
  }

  private paintFoot(): void {
    this.foot.hidden = !this.answer;
    if (!this.answer) return;
    const { answer } = this;
    const { command } = answer;
    replace(
      this.foot,
      this.source.live ? undefined : make("p", {}, this.say(answer.sentence === undefined ? "offlineExample" : "offline", `${command} --serve`)),
      make("p", {}, `${this.say("command")}: `, make("code", {}, command)),
    );
  }

  /** Covers the numbers of the answer again, or uncovers them. */
  private predict(predict: boolean): void {
    this.state.predict = predict;
    this.covers = new Covers(this.answer?.tables ?? [], predict);
    this.guesses = new Guesses();
    this.paint();
    this.write();
    this.focusNext();
  }

  /** What the class predicts for the next number: Enter reveals it and counts. */
  private predictionForm(): HTMLElement {
    const { say } = this;
    const input = make("input", {
      set: { type: "text", name: "prediction", autocomplete: "off", spellcheck: "false", size: 8, disabled: this.covers.left === 0 },
    });
    const { made, right } = this.guesses;
    return make(
      "form",
      {
        class: "prediction",
        on: {
          submit: (event) => {
            event.preventDefault();
            this.check(input.value);
          },
        },
      },
      make("label", { class: "field" }, make("span", {}, say("prediction")), input),
      make("button", { set: { disabled: this.covers.left === 0 } }, say("checkIt")),
      made > 0 && make("span", { class: "hits" }, say("hits", `${right} / ${made}`)),
    );
  }

  private check(prediction: string): void {
    const { next } = this.covers;
    if (!next || !prediction.trim()) return;
    const text = textOf(this.answer?.tables ?? [], next.id);
    const hit = this.guesses.note(next.id, prediction, text);
    this.reveal(next.id);
    const { made, right } = this.guesses;
    this.status.textContent = `${this.say(hit ? "hit" : "miss", text)}. ${this.say("hits", `${right} / ${made}`)}`;
    this.steps.querySelector<HTMLInputElement>("input[name=prediction]")?.focus({ preventScroll: true });
  }

  private reveal(id: string): void {
    this.reveals(() => this.covers.reveal(id));
    const told = this.tables.querySelector(`[data-id="${CSS.escape(id)}"]`);
    told?.classList.add("fresh");
    this.status.textContent = told?.textContent ?? "";
  }

  private revealTable(table: string): void {
    this.reveals(() => this.covers.revealTable(table));
  }

  private reveals(act: () => void): void {
    act();
    this.paintTables();
    this.paintWords();
    this.paintPanel();
    this.focusNext();
  }

  private focusNext(): void {
    const { next } = this.covers;
    if (!next) return;
    const cover = this.tables.querySelector<HTMLElement>(`.cover[data-id="${CSS.escape(next.id)}"]`);
    cover?.focus({ preventScroll: true });
    cover?.closest("section")?.scrollIntoView({ block: "nearest" });
  }

  private press(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.state.predict || event.defaultPrevented) return;
    const target = event.target as HTMLElement;
    const cover = target.closest<HTMLElement>(".cover");
    if (!cover && target.closest("input, select, button, a")) return;
    const { next } = this.covers;
    if (!next) return;
    if (event.key === " ") {
      event.preventDefault();
      this.reveal(cover?.dataset.id ?? next.id);
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.revealTable(next.table);
    }
  }
}

