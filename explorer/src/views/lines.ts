/** Lines between tokens: queries on the left, keys on the right, a window of each. */

import { type Link, links, rowsOfInfinity, type Selection, share } from "../bipartite.ts";
import { FORMULA } from "../contributions.ts";
import { type Context, headName, headTitle, present, shownHead, type ViewPart } from "../context.ts";
import { make, replace, select, slider } from "../dom.ts";
import { csvOf } from "../exports.ts";
import { HeadField } from "../field.ts";
import { headLegend, headStyle, LEGEND_LINE } from "../head_colours.ts";
import { type Kept, toggled } from "../kept.ts";
import { tokensOfNoWord } from "../left_out.ts";
import type { Need } from "../loader.ts";
import { alikePins } from "../means.ts";
import { goldMarks, Matcher } from "../matching.ts";
import { regionCsv, regionNpz, regionWords, weightsOf } from "../region.ts";
import { drawShapes, type Picture, type Shape } from "../shapes.ts";
import { resize } from "../rendering/painter.ts";
import { goldCurves, LINE_HEIGHT, linkCurves, type Place, tokenLabels, TOP, weightCurves, WIDE_LABEL } from "../line_shapes.ts";
import { visible, whole } from "../text.ts";
import { EXACT, type Region, type Side } from "../types.ts";
import { linkControls, wordToggle } from "./controls.ts";
import { headControls } from "./heads_shown.ts";
import { measureControls } from "./measures.ts";
import { FarKeys } from "./far_keys.ts";
import { ScoreLine } from "./scores.ts";

const NARROW_LABEL = 96;
const NARROW = 560;
const WIDEST = 880;

export class LinesView implements ViewPart {
  readonly element = make("div", { class: "lines-view" });
  private readonly canvas = make("canvas", { set: { role: "application", "aria-roledescription": "lines between tokens", tabindex: 0 } });
  private readonly bar = make("div", { class: "bar" });
  private readonly about = make("div", { class: "about" });
  private readonly told = make("span", { class: "level", set: { role: "status" } });
  private readonly stage = make("div", { class: "stage" }, this.canvas);
  private readonly watcher = new ResizeObserver(() => this.redraw());
  private size = { width: 0, height: 0 };
  private pending = 0;
  private hovered?: { side: Side; index: number };
  /** The side on which keys keep tokens. */
  private side: Side = "query";
  private readonly matcher: Matcher;
  private readonly scores: ScoreLine;
  private readonly far: FarKeys;
  private built = "";

  constructor(private readonly context: Context) {
    this.matcher = new Matcher(context);
    this.scores = new ScoreLine(context, true);
    this.far = new FarKeys(context);
    this.element.append(this.about, this.bar, this.scores.element, this.far.element, this.stage);
    this.watcher.observe(this.stage);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointermove", (event) => this.hover(this.tokenAt(event)));
    this.canvas.addEventListener("click", (event) => this.keep(event));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    this.canvas.addEventListener("pointerleave", () => this.hover(undefined));
  }

  update(): void {
    const { map } = this.context.state();
    this.controls();
    replace(
      this.about,
      make("h2", {}, this.title(map)),
      make("span", { class: "muted" }, "queries left, keys right; point at a token to see its lines alone, click or tap to keep it"),
    );
    this.redraw();
  }

  redraw(): void {
    if (!this.pending) this.pending = requestAnimationFrame(() => this.draw());
  }

  key(event: KeyboardEvent): boolean {
    const page = this.lines() - 2;
    if (event.key !== "PageDown" && event.key !== "PageUp") return false;
    this.scroll(event.key === "PageDown" ? page : -page, "both");
    return true;
  }

  /** Scrolls each side to what is kept of it. */
  reveal(): void {
    const { at, window } = this.context.state();
    const { row0, row1, column0, column1 } = this.window();
    const place = (start: number, end: number, index: number | undefined) =>
      index === undefined || (index >= start && index < end) ? start : Math.max(0, index - ((end - start) >> 1));
    const to: [number, number] = [place(row0, row1, at.query.at(-1)), place(column0, column1, at.key.at(-1))];
    const now = [row0, column0];
    if (String(to) !== String(now) && String(to) !== String(window)) this.context.update({ window: to });
  }

  picture(): Picture {
    this.draw();
    const { map } = this.context.state();
    return { title: `${this.title(map)}: lines`, ...this.size, shapes: this.shapes() };
  }

  private title(map: number): string {
    const { length } = this.several();
    return length ? `${length} pinned heads` : headTitle(this.context, map, shownHead(this.context));
  }

  async csv(): Promise<string> {
    if (this.several().length) return this.severalCsv();
    return regionCsv(this.context, this.field(), this.window());
  }

  /** The lines that are drawn, of each head. */
  private async severalCsv(): Promise<string> {
    const region = this.window();
    const [rows, columns] = [region.row1 - region.row0, region.column1 - region.column0];
    const { map } = this.context.state();
    const queries = await this.context.tokens.range(map, "query", region.row0, region.row1);
    const keys = await this.context.tokens.range(map, "key", region.column0, region.column1);
    const lines: (string | number)[][] = [["head", "query", "query token", "key", "key token", this.context.state().measure]];
    for (const field of this.several()) {
      const weights = await weightsOf(this.context, field, region);
      const whole = this.whole(present(this.context.loader), field, weights);
      for (const { row, column, weight } of links(weights, rows, columns, this.selection(whole))) {
        const name = headName(this.context, field.mapIndex, field.head);
        lines.push([name, region.row0 + row, visible(queries[row]), region.column0 + column, visible(keys[column]), weight]);
      }
    }
    return csvOf(lines);
  }

  async npz(): Promise<Uint8Array<ArrayBuffer>> {
    if (this.several().length) throw new Error("a file of this kind has one head: choose one, or a mean");
    return regionNpz(this.context, this.field(), this.window());
  }

  destroy(): void {
    cancelAnimationFrame(this.pending);
    this.watcher.disconnect();
    this.context.loader.release(this);
  }

  private field(): HeadField {
    return new HeadField(this.context, this.context.state().map, shownHead(this.context));
  }

  /** The heads whose lines are drawn each in its colour; none where one head is shown, or a mean. */
  private several(): HeadField[] {
    const { mean, map, pins } = this.context.state();
    const heads = mean === "each" ? alikePins(this.context.meta, map, pins) : [];
    return heads.length > 1 ? heads.map((one) => new HeadField(this.context, one.map, one.head)) : [];
  }

  /** Built anew where another method asks for other controls; the one with the focus keeps it. */
  private controls(): void {
    const state = this.context.state();
    const made = JSON.stringify([state.alignment, state.words, state.mean, state.rows, state.map, state.pins]);
    if (made === this.built) return;
    this.built = made;
    const all = "button, select, input";
    const focused = [...this.bar.querySelectorAll(all)].indexOf(document.activeElement as Element);
    const directions = [
      { value: "query", label: "of each query" },
      { value: "key", label: "of each key" },
    ];
    replace(
      this.bar,
      ...headControls(this.context),
      ...measureControls(this.context),
      slider(state.measure === "weight" ? "Threshold" : "Threshold, of the greatest", { min: 0, max: 0.5, step: 0.005, value: state.threshold }, (threshold) =>
        this.context.update({ threshold }),
      ),
      slider("Greatest", { min: 1, max: 20, step: 1, value: state.top }, (top) => this.context.update({ top })),
      select("Lines", directions, state.direction, (direction) =>
        this.context.update({ direction: direction as Side }),
      ),
      ...linkControls(this.context),
      wordToggle(this.context),
      this.told,
    );
    if (focused >= 0) (this.bar.querySelectorAll(all)[focused] as HTMLElement | undefined)?.focus();
  }

  /** How many tokens fit. */
  private lines(): number {
    const legend = LEGEND_LINE * this.several().length;
    return Math.max(4, Math.min(256, Math.floor((this.stage.clientHeight - TOP - 8 - legend) / LINE_HEIGHT)));
  }

  private window(): Region {
    const { map, window } = this.context.state();
    const { queries, keys } = this.context.meta.maps[map];
    const count = this.lines();
    const row0 = Math.min(window[0], Math.max(queries - count, 0));
    const column0 = Math.min(window[1], Math.max(keys - count, 0));
    return { row0, row1: Math.min(row0 + count, queries), column0, column1: Math.min(column0 + count, keys) };
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const lines = Math.sign(event.deltaY) * Math.max(1, Math.round(Math.abs(event.deltaY) / 40));
    const [left, right] = this.columns();
    const { offsetX } = event;
    this.scroll(
      lines,
      event.shiftKey
        ? offsetX < (left + right) / 2
          ? "query"
          : "key"
        : offsetX < left
          ? "query"
          : offsetX > right
            ? "key"
            : "both",
    );
  }

  private scroll(lines: number, side: Side | "both"): void {
    const { row0, column0 } = this.window();
    const { map } = this.context.state();
    const { queries, keys } = this.context.meta.maps[map];
    const held = (start: number, count: number) =>
      Math.min(Math.max(start + lines, 0), Math.max(count - this.lines(), 0));
    this.context.update({
      window: [side === "key" ? row0 : held(row0, queries), side === "query" ? column0 : held(column0, keys)],
    });
  }

  private label(): number {
    return this.size.width < NARROW ? NARROW_LABEL : WIDE_LABEL;
  }

  private columns(): [number, number] {
    const spare = Math.max(0, this.size.width - WIDEST) / 2;
    const label = this.label();
    return [spare + label, this.size.width - spare - label];
  }

  private keep(event: MouseEvent): void {
    const token = this.tokenAt(event);
    if (!token) return;
    this.side = token.side;
    this.context.update({ at: toggled(this.context.state().at, token.side, token.index, event.shiftKey) });
  }

  /** With the focus on the lines: up and down keep the token beside the kept one, left and right choose the side. */
  private step(event: KeyboardEvent): void {
    if (event.shiftKey || !/^Arrow/.test(event.key)) return;
    event.preventDefault();
    const { at, map } = this.context.state();
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.side = event.key === "ArrowLeft" ? "query" : "key";
    const region = this.window();
    const kept = at[this.side].at(-1);
    const count = this.context.tokens.count(map, this.side);
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    const first = this.side === "query" ? region.row0 : region.column0;
    const index = kept === undefined ? first : Math.min(Math.max(kept + step, 0), count - 1);
    this.context.update({ at: { ...at, [this.side]: [index] } });
  }

  private tokenAt(event: MouseEvent): { side: Side; index: number } | undefined {
    const [left, right] = this.columns();
    const line = Math.floor((event.offsetY - TOP) / LINE_HEIGHT);
    const region = this.window();
    if (line < 0) return undefined;
    if (event.offsetX <= left && line < region.row1 - region.row0) return { side: "query", index: region.row0 + line };
    if (event.offsetX >= right && line < region.column1 - region.column0)
      return { side: "key", index: region.column0 + line };
    return undefined;
  }

  private hover(token: { side: Side; index: number } | undefined): void {
    if (token?.side === this.hovered?.side && token?.index === this.hovered?.index) return;
    this.hovered = token;
    this.redraw();
  }

  private draw(): void {
    cancelAnimationFrame(this.pending);
    this.pending = 0;
    this.size = { width: this.stage.clientWidth, height: this.stage.clientHeight };
    if (!this.size.width) return;
    const ratio = devicePixelRatio || 1;
    resize(this.canvas, { width: Math.round(this.size.width * ratio), height: Math.round(this.size.height * ratio) });
    const context = this.canvas.getContext("2d") as CanvasRenderingContext2D;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.size.width, this.size.height);
    drawShapes(context, this.shapes());
  }

  private shapes(): Shape[] {
    const field = this.field();
    const region = this.window();
    const [rows, columns] = [region.row1 - region.row0, region.column1 - region.column0];
    const [left, right] = this.columns();
    const kept = this.context.state().at;
    const palette = this.context.palette();
    const place: Place = { left, right, label: this.label(), region, hovered: this.hovered, kept, palette };
    const several = this.several();
    return this.context.loader.frame(this, (need) => {
      const token = (side: Side, index: number) => this.context.tokens.at(need, field.mapIndex, side, index);
      const shapes: Shape[] = [];
      if (several.length) {
        shapes.push(...this.coloured(need, several, place));
      } else if (!field.offers(EXACT, region)) {
        this.say("the exact weights of these queries and keys are not in this page");
      } else {
        const weights = this.weights(need, field, region);
        const matched = this.matcher.look(need, field);
        this.scores.show(field, matched);
        if (weights) {
          const selection = this.selection(this.whole(need, field, weights));
          const found = withKept(links(weights, rows, columns, selection), weights, columns, region, kept);
          shapes.push(...weightCurves(found, place, matched !== undefined));
          if (this.context.state().gold) shapes.push(...goldCurves(goldMarks(field.map), place));
          if (matched) shapes.push(...linkCurves(matched.marks, place));
          const part = (100 * share(weights, rows, columns)).toFixed(0);
          const inside = this.context.meta.quantity ? `contribution ${FORMULA}` : `${part} % of the weight of these queries lies in this window`;
          const broken = rowsOfInfinity(weights, columns);
          const nan = broken ? ` · ${whole(broken)} of these queries attend to NaN and have no lines` : "";
          const outside = this.outside(need, field, region);
          this.say(`${whole(found.length)} lines · ${regionWords(region)} · ${inside}${outside}${nan}`);
        }
      }
      if (several.length) this.far.hide();
      else shapes.push(...this.far.look(need, field, place));
      return [...shapes, ...tokenLabels(field.map.kind === "cross", place, token)];
    });
  }

  /** The lines of several heads in their colours, and a legend below them. */
  private coloured(need: Need, fields: HeadField[], place: Place): Shape[] {
    const { region, left, right, palette } = place;
    const [rows, columns] = [region.row1 - region.row0, region.column1 - region.column0];
    const names = fields.map((field) => headName(this.context, field.mapIndex, field.head));
    let count = 0;
    const curves = fields.flatMap((field, at) => {
      const weights = field.offers(EXACT, region) && this.weights(need, field, region);
      if (!weights) return [];
      const selection = this.selection(this.whole(need, field, weights));
      const found = withKept(links(weights, rows, columns, selection), weights, columns, region, place.kept);
      count += found.length;
      return weightCurves(found, place, false, headStyle(at));
    });
    this.scores.show(fields[0], undefined);
    this.say(`${whole(count)} lines of ${fields.length} heads · ${regionWords(region)}`);
    const below = TOP + Math.max(rows, columns) * LINE_HEIGHT + LEGEND_LINE / 2;
    return [...curves, ...headLegend(names, left - 40, below, right - left + 80, palette.ink)];
  }

  /** Which lines are drawn: of contributions those that reach a part of the greatest, since these have no sum. */
  private selection(whole: number): Selection {
    const { threshold, top, direction } = this.context.state();
    return { threshold: threshold * whole, top, direction };
  }

  /** What the threshold is a part of. */
  private whole(need: Need, field: HeadField, inSight: Float32Array): number {
    if (!this.context.meta.quantity) return 1;
    const most = field.maximum(need, EXACT, { reduce: "max", normalise: false, clip: false });
    return most ?? inSight.reduce((found, one) => (Number.isFinite(one) && one > found ? one : found), 0);
  }

  private weights(need: Need, { mapIndex, head }: HeadField, region: Region): Float32Array | undefined {
    return need(`lines ${mapIndex}/${head}/${Object.values(region).join("/")}`, (signal) =>
      this.context.source.weights(mapIndex, head, region, signal),
    );
  }

  /** What the queries give to tokens of no word, which a map between words has not. */
  private outside(need: Need, { mapIndex, head }: HeadField, { row0, row1 }: Region): string {
    const tokens = this.context.tokenMaps?.[mapIndex];
    if (!tokens || !tokensOfNoWord(tokens, "key").length) return "";
    const sums = need(`profile ${mapIndex}/${head}/sum`, (signal) =>
      this.context.source.profile(mapIndex, head, "sum", signal),
    );
    const known = sums ? [...sums.subarray(row0, row1)].filter(Number.isFinite) : [];
    if (!known.length) return "";
    const rest = Math.max(0, 1 - known.reduce((sum, one) => sum + one, 0) / known.length);
    return `, ${(100 * rest).toFixed(0)} % on tokens of no word, which Words leaves out`;
  }

  private say(text: string): void {
    if (this.told.textContent !== text) this.told.textContent = text;
    const { query, key } = this.context.state().at;
    const kept = query.length || key.length ? ` · kept: queries ${query.join() || "none"}, keys ${key.join() || "none"}` : "";
    this.canvas.setAttribute("aria-label", `lines between tokens: ${text}${kept}`);
  }
}

/** Lines, and those of kept pairs in the window, also where they are below the threshold. */
function withKept(found: Link[], weights: Float32Array, columns: number, region: Region, kept: Kept): Link[] {
  const drawn = new Set(found.map(({ row, column }) => row * columns + column));
  const rows = kept.query.map((index) => index - region.row0).filter((row) => row >= 0 && row < region.row1 - region.row0);
  const own = kept.key.map((index) => index - region.column0).filter((column) => column >= 0 && column < columns);
  const more = rows.flatMap((row) => own.map((column) => ({ row, column, weight: weights[row * columns + column] })));
  const missing = more.filter(({ row, column, weight }) => weight > 0 && weight < Infinity && !drawn.has(row * columns + column));
  return missing.length ? [...found, ...missing].sort((a, b) => b.weight - a.weight) : found;
}
