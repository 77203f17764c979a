/** Makes the context of an atlas. */

import type { Context } from "./context.ts";
import { Loader } from "./loader.ts";
import { withMeans } from "./means.ts";
import type { Raster } from "./raster.ts";
import { Bounded } from "./rendering/painter.ts";
import { shortNames } from "./text.ts";
import { Tokens } from "./tokens.ts";
import type { AttentionMap, Meta, Source } from "./types.ts";

const DERIVED_BYTES = 24e6;

/** What is the same for all atlases of an explorer. */
export type Shared = Pick<Context, "beside" | "before" | "effects" | "contributionFault" | "renderer" | "state" | "update" | "palette" | "announce">;

/** `tokenMaps`: the maps by tokens, where those of `meta` are between words. */
export function makeContext(
  given: Source,
  meta: Meta,
  atlas: Context["atlas"],
  shared: Shared,
  tokenMaps?: readonly AttentionMap[],
): Context {
  const loader = new Loader();
  const { source, means } = withMeans(given, meta);
  return {
    ...shared,
    source,
    meta,
    tokenMaps,
    means,
    atlas,
    loader,
    tokens: new Tokens(source, meta, loader, () => shared.state().rows === "read"),
    derived: new Bounded<Raster>(DERIVED_BYTES, () => undefined),
    names: shortNames(meta.maps.map((map) => map.name)),
    offers: (map, head, level, region) => source.offers?.(map, head, level, region) ?? true,
  };
}
