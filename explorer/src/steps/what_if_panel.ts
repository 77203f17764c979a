/** The panel of what-ifs: score, 1/√d, the mask and a number added to the score of each key. */

import { button, make, replace, select } from "../dom.ts";
import type { Answer } from "./answers.ts";
import { type Changes, readChanges, writeChanges } from "./page_state.ts";
import type { Say } from "./page_words.ts";
import { shownToken } from "./table_view.ts";

/** How far a score can be dragged. */
export const LIVE_RANGE = { least: -10, most: 10, step: 0.5 };
export const STORED_RANGE = { least: -4, most: 4, step: 1 };

interface KeyRow {
  attend: HTMLInputElement;
  slider: HTMLInputElement;
  added: HTMLOutputElement;
  weight: HTMLElement;
}

/** Its controls stay while an answer arrives, so that a slider can be dragged on; they are made anew for other keys. */
export class WhatIfPanel {
  readonly element = make("section", { class: "what-if", set: { "aria-labelledby": "what-if-title" } });
  private made = "";
  private rows: KeyRow[] = [];
  private score?: HTMLSelectElement;
  private scale?: HTMLInputElement;
  private reset?: HTMLButtonElement;

  /** `allowed`: whether changes can be made together; where they cannot, the last takes the place of those before. */
  constructor(
    private readonly live: boolean,
    private readonly allowed: (changes: string[]) => boolean,
    private readonly change: (changes: string[]) => void,
  ) {}

  show(answer: Answer, changes: string[], say: Say, weights: string[]): void {
    const { keys = [], scores = [], attended = [], attends = [] } = answer;
    this.element.hidden = keys.length === 0;
    const made = JSON.stringify([keys, scores, attended, answer.scaled, answer.request?.head === null, say("whatIf")]);
    if (made !== this.made) this.make(answer, say);
    this.made = made;
    const read = readChanges(changes);
    if (this.score) this.score.value = read.score;
    if (this.scale) this.scale.checked = !read.unscaled;
    if (this.reset) this.reset.disabled = changes.length === 0;
    this.rows.forEach((row, at) => {
      const number = read.added.get(at + 1) ?? 0;
      row.attend.checked = attends[at] ?? true;
      if (document.activeElement !== row.slider || number === 0) row.slider.value = String(number);
      row.added.textContent = signed(number);
      row.weight.textContent = weights[at] ?? "";
    });
    this.read = () => readChanges(changes);
  }

  private read: () => Changes = () => readChanges([]);

  private update(edit: (changes: Changes) => void): void {
    const [joint, single] = [this.read(), readChanges([])].map((changes) => {
      edit(changes);
      return writeChanges(changes);
    });
    this.change(this.allowed(joint) ? joint : single);
  }

  private make(answer: Answer, say: Say): void {
    const { keys = [], scores = [], attended = [], adds = true, drops = false } = answer;
    const own = answer.sentence === undefined ? "given" : "trained";
    const named = (score: string) => score.replace("_", " ");
    const choices = scores.map((score, at) =>
      at === 0 ? { value: "", label: say(own, named(score)) } : { value: score, label: named(score) },
    );
    this.score = undefined;
    const score = select(say("score"), choices, "", (value) =>
      this.update((changes) => {
        changes.score = value;
        if (value !== "scaled_dot" && scores[0] !== "scaled_dot") changes.unscaled = false;
      }),
    );
    if (scores.length) this.score = score.querySelector("select") as HTMLSelectElement;
    this.scale = undefined;
    let scale: HTMLElement | undefined;
    if (answer.scaled) {
      this.scale = make("input", {
        set: { type: "checkbox" },
        on: { change: () => this.update((changes) => (changes.unscaled = !this.scale?.checked)) },
      });
      scale = make("label", { class: "check" }, this.scale, say("scale"));
    }
    this.reset = button(say("reset"), () => this.change([]), { class: "reset" });
    this.rows = keys.map((key, at) => this.row(shownToken(key, say), at, attended[at] ?? true, drops, say));
    const oneHead = answer.request?.head !== null;
    const weighed = oneHead && !drops && answer.tables.some(({ key }) => key === "weights");
    const head = [say("key"), say("attend"), ...(adds ? [say("add")] : []), ...(weighed ? [say("weight")] : [])];
    const body = this.rows.map((row, at) =>
      make(
        "tr",
        {},
        make("th", { set: { scope: "row" } }, shownToken(keys[at], say)),
        make("td", {}, row.attend),
        adds && make("td", { class: "drag" }, row.slider, row.added),
        weighed && make("td", { class: "weight" }, row.weight),
      ),
    );
    replace(
      this.element,
      make("h2", { set: { id: "what-if-title" } }, say("whatIf")),
      !oneHead && make("p", { class: "muted" }, say("allHeadsNote")),
      make("div", { class: "score" }, this.score && score, scale),
      make(
        "div",
        { class: "keys" },
        make(
          "table",
          {},
          make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { set: { scope: "col" } }, text)))),
          make("tbody", {}, ...body),
        ),
      ),
      this.reset,
    );
  }

  private row(key: string, at: number, attended: boolean, drops: boolean, say: Say): KeyRow {
    const { least, most, step } = this.live ? LIVE_RANGE : STORED_RANGE;
    const attend = make("input", {
      set: { type: "checkbox", "aria-label": say("attendTo", key) },
      on: {
        change: () =>
          this.update(({ flipped, dropped }) => {
            const changed = drops ? dropped : flipped;
            if (attend.checked === attended) changed.delete(at + 1);
            else changed.add(at + 1);
          }),
      },
    });
    const slider = make("input", {
      set: { type: "range", min: least, max: most, step, "aria-label": say("addTo", key) },
      on: { input: () => this.update(({ added }) => added.set(at + 1, Number(slider.value))) },
    });
    slider.value = "0";
    return { attend, slider, added: make("output", {}, "0"), weight: make("span") };
  }
}

/** A number with its sign. */
export function signed(number: number): string {
  return number > 0 ? `+${number}` : String(number).replace("-", "−");
}
