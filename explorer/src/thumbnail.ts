/** The thumbnail of a head, drawn from its coarsest level. */

import { type Colouring, colouringName } from "./colour.ts";
import type { Context } from "./context.ts";
import { make } from "./dom.ts";
import { HeadField, type Settings } from "./field.ts";
import type { Need } from "./loader.ts";
import { coarsest } from "./pyramid.ts";
import { paintInto } from "./rendering/canvas.ts";
import { EXACT } from "./types.ts";

export class Thumbnail {
  readonly canvas = make("canvas", { set: { "aria-hidden": "true" } });
  readonly field: HeadField;
  /** Whether some of its cells have no pair; known once it is drawn. */
  hasHoles = false;
  private drawn = "";

  constructor(
    private readonly context: Context,
    map: number,
    head: number,
  ) {
    this.field = new HeadField(context, map, head);
  }

  /** Draws if what it needs is there; whether that was. */
  draw(need: Need): boolean {
    const state = this.context.state();
    const settings: Settings = { reduce: state.reduce, normalise: state.normalise, clip: state.clip };
    const level = coarsest(this.field.map, (at) => this.field.offers(at));
    const raster =
      level === EXACT
        ? this.field.exact(need, { row: 0, column: 0 }, 1, settings)
        : this.field.pooled(need, level, settings);
    const maximum = this.field.maximum(need, level, settings);
    if (!raster || maximum === undefined) return false;
    const colouring: Colouring = { colours: state.colours, scale: state.scale, maximum, signed: false };
    const { broken } = this.context.palette();
    const name = `${raster.id} ${colouringName(colouring)} ${broken}`;
    if (name === this.drawn) return true;
    this.drawn = name;
    this.hasHoles = raster.data.some(Number.isNaN);
    this.canvas.classList.add("drawn");
    paintInto(this.canvas, raster, colouring, broken);
    return true;
  }
}
