/** The panel in which one chooses what is switched off, and is told what it costs before. */

import type { Context } from "../context.ts";
import { button, make, replace, select } from "../dom.ts";
import type { Need } from "../loader.ts";
import { plain } from "../text.ts";
import { comparedWords, lengthFault, type Offer, offers, requestOf } from "./effect_request.ts";
import { EffectResults } from "./effect_results.ts";
import type { EffectStore, Switched } from "./effect_store.ts";
import { REPLACEMENTS, type EffectRequest, type ModelKind, type Replacement } from "./effect_types.ts";
import { costWords, EFFECT_MEANINGS, REPLACEMENT_WORDS } from "./effect_words.ts";

/** The cost is asked for once the choices have rested so long. */
const REST = 250;

/** Why there is no button. */
const NO_MODEL = "This page has a record alone. regard explore --model FOLDER “a sentence” has both.";

export class EffectsPanel {
  /** Opens and closes the panel; of a record without its model it says why there is none. */
  readonly opener: HTMLElement;
  readonly element = make("section", { class: "effects", set: { "aria-label": "switch off", id: "regard-effects" } });
  private readonly form = make("div", { class: "bar" });
  private readonly reference = make("textarea", { set: { rows: 1, "aria-label": "the other text", spellcheck: "false" } });
  private readonly told = make("p", { class: "told-cost", set: { role: "status" } });
  private readonly results: EffectResults;
  private built = "";
  private priced = "";
  private isPriced = false;
  private asking = new AbortController();
  private timer = 0;
  private readonly unlisten: () => void;

  constructor(
    private readonly context: Context,
    private readonly store: EffectStore,
    why = NO_MODEL,
  ) {
    this.results = new EffectResults(context, store);
    this.opener = store.model
      ? button("Switch off …", () => this.toggle(), {
          class: "opener",
          set: { title: "what changes without a head, a layer, a token or a link (z)", "aria-controls": "regard-effects" },
        })
      : make("details", { class: "muted opener" }, make("summary", {}, why === NO_MODEL ? "Switching off needs the model" : "Why no switching off"), why);
    this.reference.addEventListener("input", () => {
      store.choices.reference = this.reference.value;
      this.update();
    });
    this.element.append(this.form, this.told, this.results.element);
    this.element.addEventListener("keydown", (event) => this.leave(event));
    this.unlisten = store.listen(() => this.update());
  }

  /** Opens the panel, or closes it; false where there is none. */
  toggle(): boolean {
    const { choices, model } = this.store;
    if (!model) return false;
    choices.open = !choices.open;
    this.update();
    if (choices.open) this.form.querySelector<HTMLElement>("select, button")?.focus();
    else this.opener.focus();
    return true;
  }

  /** With every frame: tokens come later. */
  update(): void {
    const { model, choices } = this.store;
    this.element.hidden = !model || !choices.open;
    if (!model) return;
    this.opener.setAttribute("aria-expanded", String(choices.open));
    const { running } = this.store;
    const progress = running && !choices.open ? ` ${running.effects.length} of ${running.before?.of ?? "…"}` : "";
    const label = choices.open ? "Switch off" : `Switch off …${progress}`;
    if (this.opener.textContent !== label) this.opener.textContent = label;
    if (!choices.open) return;
    this.context.loader.frame(this, (need) => this.build(need, model.kind));
  }

  destroy(): void {
    this.unlisten();
    this.asking.abort();
    clearTimeout(this.timer);
    this.context.loader.release(this);
  }

  /** Escape closes it, and leads no further. */
  private leave(event: KeyboardEvent): void {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    this.toggle();
  }

  private build(need: Need, kind: ModelKind): void {
    const all = offers(need, this.context, this.store);
    const offer = chosen(all, this.store.choices.switched);
    const compared = comparedWords(need, this.context, kind);
    const { replace: by } = this.store.choices;
    const isRunning = this.store.running !== undefined;
    const made = JSON.stringify([all, offer.switched, by, compared, isRunning]);
    if (made !== this.built) {
      this.built = made;
      this.controls(all, offer, compared, kind, isRunning);
    }
    this.price(requestOf(this.context, this.store, offer));
    this.results.update(kind);
  }

  private controls(all: Offer[], offer: Offer, compared: string, kind: ModelKind, isRunning: boolean): void {
    const { choices } = this.store;
    const focused = (document.activeElement as HTMLElement | null)?.dataset.effect;
    const options = all.map(({ switched, words, fault }) => ({ value: switched, label: fault ? `${words}: ${fault}` : words, disabled: fault !== "" }));
    const what = select("Switch off", options, offer.switched, (value) => {
      choices.switched = value as Switched;
      this.update();
    });
    const replacements = REPLACEMENTS.map((value) => {
      const fault = value === "before" && kind === "translator" ? ": only of models that read one text" : "";
      return { value, label: REPLACEMENT_WORDS[value] + fault, disabled: fault !== "" };
    });
    const by = select("replaced by", replacements, choices.replace, (value) => this.replacedBy(value as Replacement));
    const run = isRunning
      ? button("Cancel", () => this.store.cancel(), { set: { "data-effect": "run" } })
      : button("Switch off and run", () => this.run(), { class: "run", set: { "data-effect": "run", disabled: !this.isPriced } });
    const needsText = choices.replace === "mean" || choices.replace === "before";
    const words = choices.replace === "mean" ? "over the text" : "of the text";
    name(what, "switched");
    name(by, "replace");
    this.reference.value = choices.reference;
    this.reference.dataset.effect = "reference";
    const text = needsText && make("label", { class: "field reference" }, make("span", {}, words), this.reference);
    replace(
      this.form,
      what,
      by,
      text,
      make("span", { class: "muted", set: { title: EFFECT_MEANINGS[kind] } }, `Compared: ${compared}.`),
      run,
    );
    if (focused) this.form.querySelector<HTMLElement>(`[data-effect="${focused}"]`)?.focus();
  }

  private replacedBy(value: Replacement): void {
    const { choices, earlier } = this.store;
    choices.replace = value;
    if (value === "before" && !choices.reference) choices.reference = earlier;
    this.update();
  }

  /** Asks what the chosen run costs, and lets it run once that is told. */
  private price(request: EffectRequest | undefined): void {
    const name = JSON.stringify(request ?? null);
    if (name === this.priced || this.store.running) return;
    this.priced = name;
    this.asking.abort();
    clearTimeout(this.timer);
    this.setPriced(false);
    if (!request) return this.say(this.store.text ? "Write the other text first." : "It is not known which text this record is of.");
    this.say("Asking what it costs …");
    const asking = (this.asking = new AbortController());
    this.timer = window.setTimeout(() => void this.ask(request, asking), REST);
  }

  private async ask(request: EffectRequest, asking: AbortController): Promise<void> {
    try {
      const cost = await this.store.cost(request, asking.signal);
      if (asking.signal.aborted) return;
      const fault = lengthFault(this.context, this.store, cost);
      this.say(fault || costWords(cost), fault !== "");
      this.setPriced(!fault);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.say(error instanceof Error ? error.message : String(error), true);
    }
  }

  private setPriced(is: boolean): void {
    this.isPriced = is;
    const run = this.form.querySelector<HTMLButtonElement>("button.run");
    if (run) run.disabled = !is;
  }

  private say(words: string, failed = false): void {
    this.told.textContent = words;
    this.told.classList.toggle("failed", failed);
    this.told.setAttribute("role", failed ? "alert" : "status");
  }

  private run(): void {
    const { model, choices } = this.store;
    if (!model || !this.isPriced) return;
    const [offer, compared] = this.context.loader.frame(this, (need) => [
      chosen(offers(need, this.context, this.store), choices.switched),
      comparedWords(need, this.context, model.kind),
    ] as const);
    const request = requestOf(this.context, this.store, offer);
    if (!request) return;
    void this.store.run(request, titleOf(request, offer), compared);
  }
}

function chosen(all: Offer[], switched: Switched): Offer {
  return all.find((offer) => offer.switched === switched && !offer.fault) ?? all.find(({ fault }) => !fault) ?? all[all.length - 1];
}

/** What was switched off, and what stands in its place. */
function titleOf({ terms, replace: by, reference }: EffectRequest, { words }: Offer): string {
  const what = terms === null ? "each head alone" : words;
  const text = `“${plain(reference ?? "", 60)}”`;
  if (by === "before") return `With ${what} as in ${text}`;
  if (by === "mean") return `Without ${what}, replaced by its mean over ${text}`;
  return `Without ${what}, replaced by ${REPLACEMENT_WORDS[by]}`;
}

function name(label: HTMLLabelElement, effect: string): void {
  const box = label.querySelector("select");
  if (box) box.dataset.effect = effect;
}
