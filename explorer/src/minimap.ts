/** The whole map in small, with a frame round what is seen of it, where that is a small part. */

import type { Context } from "./context.ts";
import { make, replace } from "./dom.ts";
import type { Field } from "./field.ts";
import { Thumbnail } from "./thumbnail.ts";
import type { Size } from "./types.ts";
import { type Viewport, visible } from "./viewport.ts";

/** Shown where less than this part of the rows or of the columns is seen. */
const SMALL_PART = 0.5;
const LEAST_FRAME = 5;

export class Minimap {
  readonly element = make("div", { class: "minimap", set: { hidden: true, "aria-hidden": "true", title: "the whole map: press to go there" } });
  private readonly frame = make("div", { class: "minimap-frame" });
  private thumbnail?: Thumbnail;
  private extent = { rows: 1, columns: 1 };

  /** `go` is told the row and the column that a press asks for. */
  constructor(
    private readonly context: Context,
    private readonly go: (row: number, column: number) => void,
  ) {
    this.element.addEventListener("pointerdown", (event) => {
      event.stopPropagation(); // the map below does not move along
      this.element.setPointerCapture(event.pointerId);
      this.press(event);
    });
    this.element.addEventListener("pointermove", (event) => {
      event.stopPropagation();
      if (event.buttons) this.press(event);
    });
    for (const name of ["pointerup", "click", "dblclick"] as const) this.element.addEventListener(name, (event) => event.stopPropagation());
  }

  draw(field: Field, viewport: Viewport, size: Size): void {
    const { queries, keys } = field.map;
    this.extent = { rows: queries, columns: keys };
    const seen = visible(viewport, this.extent, size);
    const part = Math.min((seen.row1 - seen.row0) / queries, (seen.column1 - seen.column0) / keys);
    const room = size.width >= 200 && size.height >= 200;
    this.element.hidden = !(part < SMALL_PART && room);
    if (this.element.hidden) {
      this.context.loader.release(this);
      return;
    }
    const [{ mapIndex, head }] = field.heads;
    if (this.thumbnail?.field.mapIndex !== mapIndex || this.thumbnail.field.head !== head) {
      this.thumbnail = new Thumbnail(this.context, mapIndex, head);
      replace(this.element, this.thumbnail.canvas, this.frame);
    }
    this.context.loader.frame(this, (need) => this.thumbnail?.draw(need));
    const shape = Math.max(queries, keys);
    this.element.style.setProperty("--wide", String(keys / shape));
    this.element.style.setProperty("--high", String(queries / shape));
    const box = this.element.getBoundingClientRect();
    const place = (start: number, end: number, count: number, length: number) => {
      const long = Math.max(((end - start) / count) * length, LEAST_FRAME);
      return { at: Math.min(Math.max(((start + end) / 2 / count) * length - long / 2, 0), length - long), long };
    };
    const down = place(seen.row0, seen.row1, queries, box.height);
    const across = place(seen.column0, seen.column1, keys, box.width);
    Object.assign(this.frame.style, { left: `${across.at}px`, top: `${down.at}px`, width: `${across.long}px`, height: `${down.long}px` });
  }

  destroy(): void {
    this.context.loader.release(this);
  }

  private press({ clientX, clientY }: PointerEvent): void {
    const box = this.element.getBoundingClientRect();
    const part = (at: number, length: number) => Math.min(Math.max(at / length, 0), 1);
    this.go(part(clientY - box.top, box.height) * this.extent.rows, part(clientX - box.left, box.width) * this.extent.columns);
  }
}
