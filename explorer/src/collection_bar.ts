/** The bar that chooses and compares atlases, and has the text that the model is run on. */

import { labels } from "./atlases.ts";
import { make, replace, select, toggle } from "./dom.ts";
import type { State } from "./state.ts";
import { plain } from "./text.ts";
import type { Collection } from "./types.ts";

const MOST_LINES = 4;

export interface CollectionActions {
  run(text: string, signal: AbortSignal): Promise<void>;
  choose(atlas: number): void;
  compare(atlas: number | undefined): void;
  /** Gives the focus back to the explorer. */
  leave(): void;
}

/** What the atlases are called where they stand side by side; "" where there is one only. */
export function shortLabels({ atlases, rerun }: Collection): string[] {
  if (atlases.length < 2) return atlases.map(() => "");
  if (rerun) return atlases.map((_, at) => (at ? "before" : "now"));
  return labels(atlases.map(({ name }) => name));
}

export class CollectionBar {
  readonly element = make("section", { class: "collection bar", set: { "aria-label": "atlases", hidden: true } });
  private readonly chooser = make("span", { class: "chooser" });
  private readonly text = make("textarea", {
    set: { rows: 1, "aria-label": "text that the model reads (e)", spellcheck: "false" },
    on: { keydown: (event) => this.typed(event) },
  });
  private readonly press = make("button", { class: "run", set: { type: "submit" } });
  private readonly message = make("p", { class: "message", set: { role: "status" } });
  private readonly form = make(
    "form",
    {
      class: "rerun",
      on: {
        submit: (event) => {
          event.preventDefault();
          void this.submit();
        },
      },
    },
    this.text,
    this.press,
  );
  private shown?: Collection;
  private built = "";
  private running?: AbortController;

  constructor(private readonly actions: CollectionActions) {
    this.element.append(this.form, this.chooser, this.message);
    this.rest();
  }

  /** Brought up to date; what has the focus stays as it is. */
  update(collection: Collection, state: State): void {
    if (collection !== this.shown) {
      this.shown = collection;
      this.built = "";
      this.element.hidden = collection.atlases.length < 2 && !collection.rerun;
      if (collection.rerun) this.put(collection.atlases[0].name);
      this.form.hidden = !collection.rerun;
    }
    if (collection.atlases.length > 1) this.choices(collection, state);
  }

  /** Puts the focus into the text; false where there is none. */
  edit(): boolean {
    if (!this.shown?.rerun) return false;
    this.text.focus();
    this.text.select();
    return true;
  }

  /** Runs the model on a text that was not typed. */
  read(text: string): void {
    if (this.running) return;
    this.put(text);
    void this.submit();
  }

  destroy(): void {
    this.running?.abort();
  }

  private put(text: string): void {
    this.text.value = text;
    this.text.rows = Math.min(text.split("\n").length, MOST_LINES);
  }

  private typed(event: KeyboardEvent): void {
    // Of an input method, Enter takes a candidate.
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.running) void this.submit();
    } else if (event.key === "Escape") {
      event.preventDefault();
      if (this.running) this.cancel();
      else this.actions.leave();
    }
  }

  private cancel(): void {
    if (this.shown?.cancels) this.running?.abort();
  }

  /** Runs the model; a press while it runs cancels that. */
  private async submit(): Promise<void> {
    if (this.running) return this.cancel();
    const running = (this.running = new AbortController());
    const { cancels } = this.shown ?? {};
    this.text.readOnly = true;
    this.form.setAttribute("aria-busy", "true");
    this.press.textContent = cancels ? "Cancel" : "Running";
    this.press.disabled = !cancels;
    this.say("running the model …");
    try {
      await this.actions.run(this.text.value, running.signal);
      this.say("");
    } catch (error) {
      const words = error instanceof Error ? error.message : String(error);
      this.say(running.signal.aborted ? "cancelled" : words, !running.signal.aborted);
    } finally {
      this.running = undefined;
      this.rest();
    }
  }

  private rest(): void {
    this.text.readOnly = false;
    this.form.removeAttribute("aria-busy");
    this.press.disabled = false;
    this.press.textContent = "Run";
    this.press.title = "run the model on this text (Enter)";
  }

  private say(words: string, failed = false): void {
    this.message.setAttribute("role", failed ? "alert" : "status");
    this.message.classList.toggle("failed", failed);
    this.message.textContent = plain(words, 400);
    if (!words) this.message.textContent = "";
  }

  private choices(collection: Collection, state: State): void {
    const { atlas, against } = state;
    const made = JSON.stringify([atlas, against, state.view === "compare"]);
    if (made === this.built) return;
    const first = !this.built;
    this.built = made;
    const short = shortLabels(collection);
    const names = collection.atlases.map(({ name }, at) => (collection.rerun ? `${short[at]} · ${plain(name, 36)}` : short[at]));
    const options = names.map((label, at) => ({ value: String(at), label }));
    const last = collection.atlases.length - 1;
    const slider = this.chooser.querySelector("input");
    if (!first && slider) {
      // It is in the hand, perhaps: everything else is built anew around it.
      this.slide(slider, atlas, names);
      this.chooser.querySelectorAll("label").forEach((label, at) => {
        const box = label.querySelector("select");
        if (box) box.value = at === 0 ? String(atlas) : String(against ?? "");
      });
      return;
    }
    const which = select("Atlas", options, String(atlas), (value) => this.actions.choose(Number(value)));
    which.title = "previous, next: , .";
    if (last > 1) {
      const range = make("input", {
        set: { type: "range", min: 0, max: last, step: 1, "aria-label": "atlas (, .)" },
        on: { input: () => this.actions.choose(Number(range.value)) },
      });
      this.slide(range, atlas, names);
      const none = { value: "", label: "nothing" };
      const beside = select("Compare with", [none, ...options], String(against ?? ""), (value) =>
        this.actions.compare(value === "" ? undefined : Number(value)),
      );
      beside.title = "the one before: b";
      replace(this.chooser, which, range, beside);
      return;
    }
    const other = last - atlas;
    const on = against !== undefined && state.view === "compare";
    const compare = toggle(
      `Compare with ${collection.rerun ? short[other] : names[other]}`,
      on,
      () => this.actions.compare(on ? undefined : other),
      "this head in both, and what this one gives more (b)",
    );
    const focused = [...this.chooser.querySelectorAll("select, button")].indexOf(document.activeElement as Element);
    replace(this.chooser, which, compare);
    if (focused >= 0) (this.chooser.querySelectorAll("select, button")[focused] as HTMLElement | undefined)?.focus();
  }

  private slide(range: HTMLInputElement, atlas: number, names: readonly string[]): void {
    range.value = String(atlas);
    range.setAttribute("aria-valuetext", names[atlas]);
  }
}
