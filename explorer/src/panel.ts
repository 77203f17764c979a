/** One map with deep zoom: its raster, rulers, profiles, crosshair and what they say. */

import { type Context, keptOf, present } from "./context.ts";
import { make } from "./dom.ts";
import type { Field } from "./field.ts";
import { listen } from "./gestures.ts";
import { Hover } from "./hover.ts";
import { isNothing, onePair, pair, toggled, toggledPair } from "./kept.ts";
import { legendShapes } from "./legend.ts";
import { Minimap } from "./minimap.ts";
import { goldMarks, type Matched, Matcher } from "./matching.ts";
import { type Decoration, decorationShapes, type Insets } from "./overlay.ts";
import { type Choice, words } from "./pyramid.ts";
import type { Painter } from "./rendering/painter.ts";
import { resize } from "./rendering/painter.ts";
import { painter } from "./rendering/choose.ts";
import { scene } from "./scene.ts";
import { drawShapes, type Picture, type Shape } from "./shapes.ts";
import { EXACT, type Side, type Size } from "./types.ts";
import {
  between,
  cellAt,
  clamp,
  type Extent,
  fit,
  fromFrame,
  pan,
  toFrame,
  type Viewport,
  visible,
  zoomAt,
} from "./viewport.ts";

const ZOOM_TIME = 160;
const WIDE: Insets = { left: 124, top: 116, right: 128, bottom: 64 };
const NARROW: Insets = { left: 100, top: 92, right: 16, bottom: 30 };

export class Panel {
  readonly element: HTMLElement;
  private readonly matcher: Matcher;
  private painter: Painter;
  private readonly overlay = make("canvas", { class: "overlay", set: { "aria-hidden": "true" } });
  private readonly plot = make("div", { class: "plot", set: { role: "application", "aria-roledescription": "heat map", tabindex: 0 } });
  private readonly hover: Hover;
  private readonly watcher: ResizeObserver;
  private size: Size = { width: 0, height: 0 };
  private shown: Choice = { level: 0, factor: 1 };
  /** The value of the last colour. */
  private maximum?: number;
  private readonly minimap: Minimap;
  private pending = 0;
  private animation = 0;
  private placed = "";
  /** The last level shown in words, for the status line. */
  said = "";
  onsaid?: (words: string) => void;
  /** Told with every drawing what the links are worth. */
  onmatched?: (found: Matched | undefined) => void;

  constructor(
    private readonly context: Context,
    private field: Field,
    private readonly wide: boolean,
  ) {
    this.matcher = new Matcher(context);
    this.painter = painter(context.renderer, () => this.repaint());
    this.plot.append(this.painter.canvas);
    this.hover = new Hover(
      context,
      () => this.field,
      () => this.draw(),
    );
    this.minimap = new Minimap(context, (row, column) => this.centre(row, column));
    this.plot.append(this.minimap.element);
    this.element = make("div", { class: "panel" }, this.overlay, this.plot, this.hover.element);
    listen(this.plot, {
      zoom: (factor, x, y) => this.move(zoomAt(this.viewport(), factor, x, y)),
      pan: (dx, dy) => this.move(pan(this.viewport(), dx, dy)),
      tap: (x, y, several) => this.keep(x, y, several),
      hover: (x, y) => this.hover.at(cellAt(this.viewport(), this.extent(), x, y), this.inElement(x, y), this.size),
      leave: () => this.hover.leave(),
    });
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.element.addEventListener("click", (event) => this.keepToken(event));
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.element);
  }

  show(field: Field): void {
    this.field = field;
    this.hover.leave();
    this.draw();
  }

  /** Draws before the next frame of the screen. */
  draw(): void {
    if (!this.pending) this.pending = requestAnimationFrame(() => this.drawNow());
  }

  /** Larger or smaller about the chosen cell, else the middle. */
  zoom(factor: number): void {
    const from = this.viewport();
    const at = onePair(this.context.state().at);
    const size = this.inner();
    const x = at ? (at[1] + 0.5 - from.column) * from.scale : -1;
    const y = at ? (at[0] + 0.5 - from.row) * from.scale : -1;
    const seen = x >= 0 && y >= 0 && x <= size.width && y <= size.height;
    this.glide(zoomAt(from, factor, seen ? x : size.width / 2, seen ? y : size.height / 2));
  }

  fit(): void {
    this.glide(fit(this.extent(), this.inner()), true);
  }

  panBy(columns: number, rows: number): void {
    const { width, height } = this.inner();
    this.glide(pan(this.viewport(), -columns * width, -rows * height));
  }

  /** Brings a cell to the middle, close enough to read its tokens; of a token alone the cell on the diagonal. */
  goTo(query: number | undefined, key: number | undefined): void {
    const own = this.field.map.kind === "self";
    const [row, column] = [query ?? (own ? key : 0) ?? 0, key ?? (own ? query : 0) ?? 0];
    const from = this.viewport();
    const size = this.inner();
    const scale = Math.max(from.scale, 22);
    this.glide({ row: row + 0.5 - size.height / scale / 2, column: column + 0.5 - size.width / scale / 2, scale });
  }

  /** Brings a place to the middle, in the same size. */
  private centre(row: number, column: number): void {
    const from = this.viewport();
    const size = this.inner();
    this.move({ ...from, row: row - size.height / from.scale / 2, column: column - size.width / from.scale / 2 });
  }

  /** Moves the map where what is kept lies out of sight. */
  reveal(): void {
    this.measure();
    const { at, frame } = this.context.state();
    if (!frame || isNothing(at) || !this.size.width) return;
    const [row, column] = [at.query.at(-1), at.key.at(-1)];
    const from = this.viewport();
    const size = this.inner();
    const place = (start: number, index: number | undefined, length: number) => {
      const seen = index === undefined || (index >= start && index + 1 <= start + length / from.scale);
      return seen ? start : index + 0.5 - length / from.scale / 2;
    };
    const to = { ...from, row: place(from.row, row, size.height), column: place(from.column, column, size.width) };
    if (to.row !== from.row || to.column !== from.column) this.move(to);
  }

  picture(): Picture {
    this.drawNow();
    const { width, height } = this.size;
    return { title: `${this.field.title}, ${this.said}`, width, height, shapes: [this.raster(), ...this.shapes()] };
  }

  viewport(): Viewport {
    const { frame } = this.context.state();
    const size = this.inner();
    return frame ? clamp(fromFrame(frame, size), this.extent(), size) : fit(this.extent(), size);
  }

  /** What is drawn: a pooled level, or exact weights. */
  get choice(): Choice {
    return this.shown;
  }

  extent(): Extent {
    return { rows: this.field.map.queries, columns: this.field.map.keys };
  }

  inner(): Size {
    const { left, top, right, bottom } = this.insets();
    return {
      width: Math.max(this.size.width - left - right, 40),
      height: Math.max(this.size.height - top - bottom, 40),
    };
  }

  destroy(): void {
    cancelAnimationFrame(this.pending);
    cancelAnimationFrame(this.animation);
    this.watcher.disconnect();
    this.hover.destroy();
    this.minimap.destroy();
    this.context.loader.release(this);
    this.painter.destroy();
  }

  private insets(): Insets {
    const wide = this.wide && this.size.width > 520;
    if (wide) return WIDE;
    // In a narrow panel what the map does not need is left free on both sides.
    const { rows, columns } = this.extent();
    const { left, top, right, bottom } = NARROW;
    const needed = ((this.size.height - top - bottom) * columns) / rows;
    const spare = Math.max(0, Math.floor((this.size.width - left - right - needed) / 2));
    return { ...NARROW, left: left + spare, right: right + spare };
  }

  /** As wide as the whole map needs at this height, so that nothing empty lies between map and rulers. */
  private takeWidth(): void {
    if (!this.wide) return;
    const { rows, columns } = this.extent();
    const { left, top, right, bottom } = WIDE;
    const height = Math.max(this.element.clientHeight - top - bottom, 40);
    const basis = `${Math.ceil(left + (height * columns) / rows + right)}px`;
    if (this.element.style.flexBasis !== basis) this.element.style.flexBasis = basis;
  }

  private move(viewport: Viewport): void {
    cancelAnimationFrame(this.animation);
    const size = this.inner();
    this.context.update({ frame: toFrame(clamp(viewport, this.extent(), size), size) });
  }

  private glide(target: Viewport, whole = false): void {
    cancelAnimationFrame(this.animation);
    const size = this.inner();
    const from = this.viewport();
    const to = clamp(target, this.extent(), size);
    const started = performance.now();
    const time = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : ZOOM_TIME;
    const step = () => {
      const part = time ? Math.min((performance.now() - started) / time, 1) : 1;
      const at = between(from, to, part * (2 - part), size);
      this.context.update({ frame: part === 1 && whole ? undefined : toFrame(part === 1 ? to : at, size) });
      if (part < 1) this.animation = requestAnimationFrame(step);
    };
    step();
  }

  private keep(x: number, y: number, several: boolean): void {
    const cell = cellAt(this.viewport(), this.extent(), x, y);
    if (!cell) return;
    const { at } = this.context.state();
    if (!several) return this.context.update({ at: toggledPair(at, ...cell) });
    const [row, column] = cell;
    const rows = at.query.includes(row) ? at : toggled(at, "query", row, true);
    this.context.update({ at: at.key.includes(column) ? rows : toggled(rows, "key", column, true) });
  }

  /** A press on the name of a token beside the map keeps the token. */
  private keepToken(event: MouseEvent): void {
    if (this.plot.contains(event.target as Node)) return;
    const box = this.element.getBoundingClientRect();
    const token = this.tokenAt(event.clientX - box.left, event.clientY - box.top);
    if (token) this.context.update({ at: toggled(this.context.state().at, ...token, event.shiftKey) });
  }

  private tokenAt(x: number, y: number): [Side, number] | undefined {
    const { left, top } = this.insets();
    const { width, height } = this.inner();
    const { row, column, scale } = this.viewport();
    const { rows, columns } = this.extent();
    const [down, across] = [row + (y - top) / scale, column + (x - left) / scale];
    if (x < left && y >= top && y < top + height && down >= 0 && down < rows) return ["query", Math.floor(down)];
    if (y < top && x >= left && x < left + width && across >= 0 && across < columns) return ["key", Math.floor(across)];
    return undefined;
  }

  /** With the focus on the map, arrows keep the cell beside the kept one; from nothing, the cell in the middle. */
  private step(event: KeyboardEvent): void {
    if (event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps: Record<string, [number, number]> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      Home: [0, -Infinity],
      End: [0, Infinity],
      Enter: [0, 0],
    };
    if (!Object.hasOwn(steps, event.key)) return;
    event.preventDefault();
    const { at } = this.context.state();
    const { rows, columns } = this.extent();
    const seen = visible(this.viewport(), this.extent(), this.inner());
    const [down, across] = isNothing(at) ? [0, 0] : steps[event.key];
    const row = at.query.at(-1) ?? Math.floor((seen.row0 + seen.row1) / 2);
    const column = at.key.at(-1) ?? Math.floor((seen.column0 + seen.column1) / 2);
    const held = (index: number, count: number) => Math.min(Math.max(index, 0), count - 1);
    this.context.update({ at: pair(held(row + down, rows), held(column + across, columns)) });
  }

  private inElement(x: number, y: number): { x: number; y: number } {
    const { left, top } = this.insets();
    return { x: x + left, y: y + top };
  }

  private drawNow(): void {
    cancelAnimationFrame(this.pending);
    this.pending = 0;
    this.measure();
    if (!this.size.width || !this.size.height) return;
    const insets = this.insets();
    const inner = this.inner();
    this.place({ left: insets.left, top: insets.top, ...inner });
    const state = this.context.state();
    const palette = this.context.palette();
    const ratio = devicePixelRatio || 1;
    const peek = present(this.context.loader);
    const drawn = this.context.loader.frame(this, (need) =>
      scene({ need, peek }, this.field, this.viewport(), inner, ratio, state),
    );
    this.shown = drawn.choice;
    this.maximum = drawn.maximum;
    this.minimap.draw(this.field, this.viewport(), inner);
    const device = { width: Math.round(inner.width * ratio), height: Math.round(inner.height * ratio) };
    const colouring = { colours: state.colours, scale: state.scale, signed: this.field.signed };
    this.painter.draw(device, drawn.quads, colouring, {
      paper: palette.hatchPaper,
      line: palette.hatchLine,
      broken: palette.broken,
      brokenPaper: palette.brokenPaper,
    });
    this.say(this.level() + (drawn.complete ? "" : ", loading"));
    resize(this.overlay, { width: Math.round(this.size.width * ratio), height: Math.round(this.size.height * ratio) });
    const context = this.overlay.getContext("2d") as CanvasRenderingContext2D;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.size.width, this.size.height);
    drawShapes(context, this.shapes());
    this.name();
  }

  private measure(): void {
    this.takeWidth();
    this.size = { width: this.element.clientWidth, height: this.element.clientHeight };
  }

  /** Where the plot lies; the style is touched only when that changes. */
  private place(box: { left: number; top: number; width: number; height: number }): void {
    const name = Object.values(box).join(" ");
    if (name === this.placed) return;
    this.placed = name;
    for (const [property, value] of Object.entries(box)) this.plot.style.setProperty(property, `${value}px`);
  }

  private level(): string {
    const { exact, quantity } = this.context.meta;
    // Levels of contributions are computed when they are asked for, and not kept in few digits.
    return words(this.field.map, this.shown, this.context.state().reduce, exact, quantity && exact);
  }

  /** For those who cannot see the picture; after the shapes, which know the weight of what is kept. */
  private name(): void {
    const kept = this.hover.kept ? ` Kept: ${this.hover.kept}.` : "";
    const label = `${this.field.title}: heat map, ${this.said}.${kept} Arrow keys keep the cell beside.`;
    if (this.plot.getAttribute("aria-label") !== label) this.plot.setAttribute("aria-label", label);
  }

  private say(text: string): void {
    if (text === this.said) return;
    this.said = text;
    this.onsaid?.(text);
  }

  private shapes(): Shape[] {
    const state = this.context.state();
    const viewport = this.viewport();
    const size = this.inner();
    const seen = visible(viewport, this.extent(), size);
    // Another owner than the panel itself, so that the two do not drop each other's wishes.
    return this.context.loader.frame(this.hover, (need) => {
      const decoration: Decoration = {
        viewport,
        size,
        insets: this.insets(),
        wide: this.insets() === WIDE,
        hovered: this.hover.cell,
        kept: keptOf(this.context, this.field.mapIndex),
        rows: state.rows,
        marks: this.matcher.marks(need, this.field, seen),
        gold: state.gold && this.field.heads.length === 1 ? goldMarks(this.field.map) : [],
      };
      const { left, top } = this.insets();
      const legend = {
        maximum: this.maximum,
        signed: this.field.signed,
        divisor: this.field.divisor(this.shown.level, state.reduce),
        mean: state.reduce === "mean" && (this.shown.level !== EXACT || this.shown.factor > 1),
        broken: this.field.heads.some((one) => one.map.broken?.[one.head]),
        room: this.size.width - left - 12,
      };
      this.onmatched?.(this.matcher.look(need, this.field));
      this.hover.look(need, this.shown.level === EXACT && this.shown.factor === 1 ? undefined : this.level());
      return [
        ...decorationShapes(need, this.context, this.field, decoration),
        {
          kind: "group",
          x: left,
          y: top + size.height + (this.insets() === WIDE ? 42 : 10),
          shapes: legendShapes(legend, state, this.context.palette()),
        },
      ];
    });
  }

  private raster(): Shape {
    const { left, top } = this.insets();
    return { kind: "image", image: this.painter.canvas, x: left, y: top, ...this.inner() };
  }

  /** The GPU has gone: the 2D canvas takes its place. */
  private repaint(): void {
    this.painter = painter("canvas", () => undefined);
    this.plot.replaceChildren(this.painter.canvas, this.minimap.element);
    this.draw();
  }
}
