/** Chooses the WebGL or the canvas painter. */

import { CanvasPainter } from "./canvas.ts";
import type { Painter } from "./painter.ts";
import { WebGLPainter } from "./webgl.ts";

/** `wish`: "canvas", "webgl" (software too), else WebGL where a GPU does the work. */
export function painter(wish: string, lost: () => void): Painter {
  if (wish === "canvas") return new CanvasPainter();
  return WebGLPainter.create(wish === "webgl", lost) ?? new CanvasPainter();
}
