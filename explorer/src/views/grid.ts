/** All heads as thumbnails: layers × heads, or in the order of a metric. */

import { badge, roleWords } from "../badges.ts";
import { type Context, headTitle, type ViewPart } from "../context.ts";
import { make, replace } from "../dom.ts";
import { mapsOf } from "../hypotheses.ts";
import { MOST_HEADS } from "../clustering.ts";
import { isNothing, keptText } from "../kept.ts";
import { KeptValues, orderFault, orderMeaning, rankedBy, type Ranking } from "../kept_values.ts";
import type { Need } from "../loader.ts";
import { FIRST_LINE } from "../meanings.ts";
import { type Head, heads, keptOrder, orderWords, rolesOf, SIMILAR, valueOf } from "../ordering.ts";
import { bySimilarity, type Ordered } from "../similar.ts";
import type { Picture } from "../shapes.ts";
import { pinned, type State } from "../state.ts";
import { abbreviated, attentionWords, figure, plain, whole } from "../text.ts";
import { Thumbnail } from "../thumbnail.ts";
import { looks } from "./controls.ts";
import { filters, showOrder } from "./filters.ts";
import { gridPicture, type PicturedHead } from "./grid_picture.ts";

const MOST_THUMBNAILS = 4096;
const FIRST = 144;
const LONG_NAME = 8;

/** A dotted name that may go on in the next line behind each of its parts. */
function breakable(name: string): Node[] {
  return name.split(/(?<=[._])/).flatMap((part) => [document.createTextNode(part), make("wbr")]);
}

export class GridView implements ViewPart {
  readonly element = make("div", { class: "grid-view" });
  private readonly bar = make("div", { class: "bar" });
  private readonly count = make("p", { class: "muted count", set: { role: "status" } });
  private readonly cells = make("div", { class: "cells" });
  private readonly thumbnails = new Map<Element, Thumbnail>();
  private readonly seen = new Set<Thumbnail>();
  private readonly watcher: IntersectionObserver;
  private readonly looks = make("span", { class: "looks" });
  /** The order of some heads by likeness, once it is known. */
  private ordered?: { name: string; by?: Ordered };
  private apart = new Map<string, number>();
  private readonly kept: KeptValues;
  /** The values of all heads by what is kept, once they are known, and where they stand. */
  private ranking?: Ranking;
  private readonly told = new Map<HTMLElement, Head>();
  /** What stands in each row, for the picture. */
  private rows: { name: string; heads: PicturedHead[] }[] = [];
  private built = "";
  private looked = "";
  private pending = 0;

  constructor(private readonly context: Context) {
    this.kept = new KeptValues(context);
    this.bar.append(...filters(context, true), this.looks);
    this.element.append(this.bar, this.count, this.cells);
    this.watcher = new IntersectionObserver((entries) => this.watch(entries), { rootMargin: "200px" });
  }

  update(): void {
    const state = this.context.state();
    showOrder(this.bar, state.order);
    const looked = JSON.stringify([state.scale, state.reduce, state.normalise, state.clip]);
    if (looked !== this.looked) {
      this.looked = looked;
      replace(this.looks, ...looks(this.context));
    }
    const made = JSON.stringify([state.order, state.role, state.metric, state.find, state.pins, state.hypothesis, keptText(state.at)]);
    if (made !== this.built) {
      this.built = made;
      this.build(state);
    }
    this.redraw();
  }

  redraw(): void {
    if (!this.pending) this.pending = requestAnimationFrame(() => this.draw());
  }

  key(event: KeyboardEvent): boolean {
    if (event.key === "/") {
      this.bar.querySelector<HTMLInputElement>("input[type=search]")?.focus();
      return true;
    }
    const focused = this.thumbnails.get(document.activeElement as Element)?.field;
    if (event.key === "p" && focused) {
      this.context.update({ pins: pinned(this.context.state().pins, [focused.mapIndex, focused.head]) });
      return true;
    }
    const step = this.step(event.key);
    if (!step) return false;
    const all = [...this.cells.querySelectorAll<HTMLButtonElement>("button.thumb")];
    const now = all.indexOf(document.activeElement as HTMLButtonElement);
    const next = now < 0 ? 0 : Math.min(Math.max(now + step, 0), all.length - 1);
    all[next]?.focus();
    return true;
  }

  /** Draws every thumbnail, also those that were not scrolled to. */
  async prepare(): Promise<void> {
    const { loader } = this.context;
    const waiting = new Set(this.thumbnails.values());
    const look = (need: Need) => {
      for (const thumbnail of waiting) if (thumbnail.draw(need)) waiting.delete(thumbnail);
    };
    try {
      for (loader.frame(waiting, look); waiting.size; loader.frame(waiting, look)) {
        if (!loader.busy) throw new Error(loader.error || "the heads could not be drawn");
        await new Promise<void>((resolve) => {
          const unlisten = loader.listen(() => {
            unlisten();
            resolve();
          });
        });
      }
    } finally {
      loader.release(waiting);
    }
  }

  picture(): Picture {
    const rows = this.rows.map(({ name, heads }) => ({ name, heads: heads.map((head) => this.pictured(head)) }));
    return gridPicture(this.context, rows, this.count.textContent ?? "");
  }

  destroy(): void {
    cancelAnimationFrame(this.pending);
    this.watcher.disconnect();
    this.context.loader.release(this);
  }

  private pictured(head: PicturedHead): PicturedHead {
    const { mapIndex: map, head: at } = head.thumbnail.field;
    return head.value ? head : { ...head, value: this.ranking?.short({ map, head: at }) ?? "" };
  }

  private step(key: string): number {
    if (key === "ArrowRight") return 1;
    if (key === "ArrowLeft") return -1;
    // A row of the picture, which need not be a layer where heads are sorted or wrapped.
    const all = [...this.cells.querySelectorAll<HTMLElement>("button.thumb")];
    const first = all[0]?.getBoundingClientRect().top;
    const row = all.findIndex((thumb) => thumb.getBoundingClientRect().top !== first);
    const width = row < 0 ? all.length : row;
    return key === "ArrowDown" ? width : key === "ArrowUp" ? -width : 0;
  }

  private build(state: State): void {
    const byKept = keptOrder(state.order) !== undefined;
    const { ranking } = this;
    const chosen = heads(this.context.meta, this.context.names, state, (head) => ranking?.size(head) ?? NaN);
    const similar = state.order === SIMILAR && state.measure === "weight";
    const name = JSON.stringify(chosen);
    if (similar && this.ordered?.name !== name) this.ordered = { name };
    const ordered = similar ? this.ordered?.by : undefined;
    const found = ordered?.heads ?? chosen;
    this.apart = new Map(ordered?.heads.map(({ map, head }, at) => [`${map}/${head}`, ordered.divergences[at]]));
    const places = mapsOf(this.context.meta, state.hypothesis);
    const all = places.reduce((sum, at) => sum + this.context.meta.maps[at].heads, 0);
    const shown = found.slice(0, MOST_THUMBNAILS);
    const more =
      found.length > shown.length
        ? ` The first ${whole(shown.length)} are shown; narrow the choice to see others.`
        : "";
    this.count.textContent = `${whole(found.length)} of ${whole(all)} heads.${more}${similar ? this.said(found.length) : ""}${this.keptSaid(state)}`;
    const focused = this.thumbnails.get(document.activeElement as Element)?.field;
    this.watcher.disconnect();
    this.thumbnails.clear();
    this.told.clear();
    this.rows = [];
    this.seen.clear();
    const byLayer = state.order === "layer" || (similar && !ordered) || (byKept && !ranking);
    this.cells.classList.toggle("sorted", !byLayer);
    this.cells.classList.toggle("few", all <= 24);
    const children: Node[] = [];
    if (byLayer) {
      const layers = new Map<number, Head[]>();
      for (const head of shown) layers.set(head.map, [...(layers.get(head.map) ?? []), head]);
      for (const [map, members] of layers) children.push(this.layer(map, members, state));
    } else {
      this.rows.push({ name: "", heads: [] });
      children.push(make("div", { class: "row" }, ...shown.map((head) => this.thumb(head, state))));
    }
    replace(this.cells, ...children);
    this.tell();
    // What is in sight is known only after the next frame; a first screen is asked for at once.
    for (const thumbnail of [...this.thumbnails.values()].slice(0, FIRST)) this.seen.add(thumbnail);
    for (const [node, { field }] of this.thumbnails) {
      this.watcher.observe(node);
      if (focused && field.title === focused.title) (node as HTMLElement).focus();
    }
  }

  /** Puts heads that are alike together, as soon as all of their coarsest levels are there. */
  private order(need: Need): void {
    const state = this.context.state();
    if (state.order !== SIMILAR || !this.ordered || this.ordered.by) return;
    this.ordered.by = bySimilarity(need, this.context, heads(this.context.meta, this.context.names, state));
    if (!this.ordered.by) return;
    this.built = "";
    this.update();
  }

  /** What the values under the heads are. */
  private keptSaid({ at, order }: State): string {
    const by = keptOrder(order);
    const fault = (by && orderFault(this.context, by)) || this.ranking?.fault;
    if (fault) return ` No order by ${orderWords(order.replace(/^-/, ""))}: ${fault}.`;
    if (by === "effect" && !this.ranking) return " Effects are not measured yet: choose Switch off …, all heads, one by one.";
    if (isNothing(at) && by !== "effect") return by ? " Nothing is kept to order them by: go to a token (g)." : ` ${FIRST_LINE}`;
    if (!this.ranking) return " Asking each head for what is kept …";
    const meaning = orderMeaning(this.context, rankedBy(this.context));
    return ` Under each: ${meaning}, and behind # its rank among ${whole(this.ranking.count)} heads.`;
  }

  /** Value and rank of what is kept, under each head. */
  private tell(): void {
    for (const [element, head] of this.told) {
      element.textContent = this.ranking?.short(head) ?? "";
      element.hidden = !element.textContent;
    }
    for (const [node, { field }] of this.thumbnails) {
      const words = this.ranking?.words({ map: field.mapIndex, head: field.head });
      const { name = "" } = (node as HTMLElement).dataset;
      const whole = words ? `${name}. Kept: ${words}` : name;
      (node.firstChild as Element).textContent = whole;
      node.setAttribute("title", whole.replace(/\. /g, "\n"));
    }
  }

  /** Follows what is kept; heads in its order are put in place once all are known. */
  private follow(need: Need): void {
    const ranking = this.kept.look(need, rankedBy(this.context));
    if (ranking === this.ranking) return;
    this.ranking = ranking;
    const state = this.context.state();
    if (keptOrder(state.order) !== undefined) this.build(state);
    this.tell();
    this.count.textContent = `${(this.count.textContent ?? "").replace(/ (Under each: |Asking each|Each picture|Effects are|Nothing is kept|No order by).*$/, "")}${this.keptSaid(state)}`;
  }

  private said(count: number): string {
    if (count > MOST_HEADS) return ` More than ${whole(MOST_HEADS)} are not compared; narrow the choice.`;
    return this.ordered?.by
      ? " Under each: its Jensen-Shannon divergence from the one before, in nats: 0 alike, 0.69 nothing in common."
      : " Comparing …";
  }

  private layer(map: number, members: Head[], state: State): HTMLElement {
    const name = this.context.names[map];
    const of = this.context.meta.maps[map];
    const size = `${whole(of.queries)} × ${whole(of.keys)}`;
    const detail = `${plain(of.name, 120)}, ${attentionWords(of)}, ${size}, call ${of.call}, sequence ${of.sequence}`;
    const beside = mapsOf(this.context.meta, state.hypothesis).map((at) => this.context.meta.maps[at]);
    const several = beside.filter((other) => other.name === of.name).length > 1;
    const label = several ? `${name} #${of.call}.${of.sequence}` : name;
    this.rows.push({ name: label, heads: [] });
    return make(
      "section",
      { class: "layer", set: { "aria-label": detail } },
      make("h2", { class: "layer-name", set: { title: detail } }, ...breakable(label)),
      make("div", { class: "row" }, ...members.map((head) => this.thumb(head, state))),
    );
  }

  private thumb({ map, head }: Head, state: State): HTMLButtonElement {
    const thumbnail = new Thumbnail(this.context, map, head);
    const of = this.context.meta.maps[map];
    const roles = rolesOf(of, head);
    const order = state.order.replace(/^-/, "");
    const apart = this.apart.get(`${map}/${head}`);
    const value = state.order === SIMILAR ? "" : `${figure(valueOf(of, head, order))} ${orderWords(order)}`;
    const sortedBy = state.order === "layer" || keptOrder(state.order) !== undefined ? "" : apart === undefined ? value : Number.isNaN(apart) ? "first" : `← ${figure(apart)}`;
    const name = sortedBy || keptOrder(state.order) !== undefined ? `${abbreviated(this.context.names[map])}·${head}` : String(head);
    const pinned = state.pins.some((pin) => pin[0] === map && pin[1] === head);
    const broken = of.broken?.[head];
    const nan = broken ? `${whole(broken)} of ${whole(of.queries)} queries attend to NaN` : "";
    const told = [headTitle(this.context, map, head), sortedBy, pinned ? "pinned" : "", nan, ...roles.map(roleWords)];
    const keptValue = make("span", { class: "kept-value", set: { hidden: true, "aria-hidden": "true" } });
    this.told.set(keptValue, { map, head });
    const box = make(
      "button",
      {
        class: "thumb",
        set: { type: "button", "data-name": told.filter(Boolean).join(". "), "data-map": map, "data-head": head },
        on: { click: () => this.context.update({ view: "head", map, head, mean: "", frame: undefined }) },
      },
      make("span", { class: "told" }),
      thumbnail.canvas,
      make(
        "span",
        { class: "caption", set: { "aria-hidden": "true" } },
        make("span", { class: "number" }, name),
        broken ? make("span", { class: "badge broken", set: { title: nan } }, "NaN") : undefined,
        pinned && make("span", { class: "pin", set: { title: "pinned for comparison" } }, "◆"),
        // Beside a long name there is no room for them; the title tells them.
        ...(name.length > LONG_NAME ? [] : roles.slice(0, 2)).map((role) => badge(role, true)),
      ),
      sortedBy ? make("span", { class: "muted value", set: { "aria-hidden": "true" } }, sortedBy) : undefined,
      keptValue,
    );
    this.thumbnails.set(box, thumbnail);
    this.rows.at(-1)?.heads.push({ thumbnail, name, value: sortedBy, pinned, roles });
    return box;
  }

  private watch(entries: IntersectionObserverEntry[]): void {
    for (const entry of entries) {
      const thumbnail = this.thumbnails.get(entry.target);
      if (!thumbnail) continue;
      if (entry.isIntersecting) this.seen.add(thumbnail);
      else this.seen.delete(thumbnail);
    }
    this.redraw();
  }

  private draw(): void {
    this.pending = 0;
    this.context.loader.frame(this, (need) => {
      for (const thumbnail of this.seen) thumbnail.draw(need);
      this.order(need);
      this.follow(need);
    });
  }
}
