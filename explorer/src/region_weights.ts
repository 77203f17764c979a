/** Assembles the weights of a region from tiles that a source returns one at a time. */

import type { Region } from "./types.ts";

/** Asks for the pieces one after the other, each of at most `side` × `side`. */
export async function weightsIn(
  region: Region,
  side: number,
  ask: (piece: Region) => Promise<Float32Array>,
): Promise<Float32Array> {
  const width = region.column1 - region.column0;
  const result = new Float32Array((region.row1 - region.row0) * width);
  for (let row0 = region.row0; row0 < region.row1; row0 += side) {
    for (let column0 = region.column0; column0 < region.column1; column0 += side) {
      const piece = {
        row0,
        column0,
        row1: Math.min(row0 + side, region.row1),
        column1: Math.min(column0 + side, region.column1),
      };
      const part = await ask(piece);
      const across = piece.column1 - column0;
      for (let row = row0; row < piece.row1; row += 1) {
        const start = (row - row0) * across;
        result.set(part.subarray(start, start + across), (row - region.row0) * width + column0 - region.column0);
      }
    }
  }
  return result;
}
