/** A page of one file, as the Python package writes it. */

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { tileRegion } from "../src/pyramid.ts";
import { TILE } from "../src/types.ts";
import { WEB } from "./harness.ts";
import { profileOf, type SyntheticAtlas, weightsOf } from "./synthetic.ts";

/** A tile of single weights: map, head, and the row and column of the tile. */
export type HeldTile = [map: number, head: number, row: number, column: number];

/**
 * The exact weights of all heads but the first, which has only its levels, or of some tiles alone; opened as a permalink
 * tells. Maps of one text share their tokens.
 */
export function staticPage(atlas: SyntheticAtlas, state = "", held?: HeldTile[]): string {
  const written = (array: Float32Array) => ({
    type: "f4",
    data: Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64"),
  });
  const data: Record<string, Record<string, unknown>> = { pooled: {}, tiles: {}, profiles: {} };
  atlas.maps.forEach((map, at) => {
    for (let head = 0; head < map.map.heads; head += 1) {
      for (const which of ["entropy", "received", "largest"])
        data.profiles[`${at}/${head}/${which}`] = written(profileOf(map, head, which));
      map.map.levels.forEach((_, level) => {
        for (const reduce of ["max", "mean"] as const)
          data.pooled[`${at}/${head}/${level}/${reduce}`] = written(map.pooled(head, level, reduce));
      });
      if (!held && at + head > 0)
        data.tiles[`${at}/${head}/0/0`] = written(
          weightsOf(map, head, { row0: 0, row1: Math.min(TILE, map.map.queries), column0: 0, column1: map.map.keys }),
        );
    }
  });
  for (const [at, head, row, column] of held ?? []) {
    const map = atlas.maps[at];
    data.tiles[`${at}/${head}/${row}/${column}`] = written(weightsOf(map, head, tileRegion(map.map, { row, column })));
  }
  const tokens = atlas.maps.map((map, at) =>
    held && at ? 0 : { query: Array.from({ length: map.map.queries }, (_, i) => map.token("query", i)) },
  );
  const meta = { ...atlas.meta, around: held !== undefined };
  const json = JSON.stringify({ meta, tokens, ...data, state }).replace(/</g, "\\u003c");
  const script = readFileSync(join(WEB, "explorer.js"), "utf8");
  const style = readFileSync(join(WEB, "explorer.css"), "utf8");
  const sum = (text: string) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;
  const policy = `default-src 'none'; script-src ${sum(script)}; style-src ${sum(style)}; img-src data: blob:`;
  return [
    `<!doctype html><html lang="en"><head><meta charset="utf-8">`,
    `<meta http-equiv="Content-Security-Policy" content="${policy}">`,
    `<title>t</title><link rel="icon" href="data:,"><style>${style}</style></head>`,
    `<body><div id="regard-explorer"></div><script type="application/json" id="regard-data">${json}</script>`,
    `<script type="module">${script}</script></body></html>`,
  ].join("");
}
