/** What a reader's choices ask of the model: which terms, of what is shown and kept, and whose output is compared. */

import { type Context, keptOf } from "../context.ts";
import type { Kept } from "../kept.ts";
import { visible, whole } from "../text.ts";
import type { Need } from "../loader.ts";
import type { Side } from "../types.ts";
import { otherKept } from "../words.ts";
import type { EffectStore, Switched } from "./effect_store.ts";
import type { EffectCost, EffectRequest, ModelKind, Terms } from "./effect_types.ts";

/** What can be switched off here, in words; with `fault` it cannot, for that reason. */
export interface Offer {
  switched: Switched;
  words: string;
  fault: string;
  terms: Terms | null;
}

const ALL: Terms = { module: null, heads: null, queries: null, keys: null };

/** The tokens that are kept, also where words are shown. */
function keptTokens(context: Context): Kept {
  const { map } = context.state();
  const kept = keptOf(context, map);
  const tokens = context.tokenMaps?.[map];
  return tokens ? otherKept(tokens, kept, false) : kept;
}

/** What can be switched off of what is shown and kept. */
export function offers(need: Need, context: Context, { model }: EffectStore): Offer[] {
  const { map, head } = context.state();
  const { name, heads, kind, texts } = context.meta.maps[map];
  const known = model?.modules.some((module) => module.name === name);
  const missing = known ? "" : "the model has no such module";
  const layer = context.names[map];
  const token = (side: Side, index: number | undefined) =>
    index === undefined ? "" : `“${tokenWords(need, context, side, index)}”`;
  const shown = keptOf(context, map);
  const kept = keptTokens(context);
  const oneText = texts ? texts[0] === texts[1] : kind === "self";
  const side: Side = kept.key.length || !oneText ? "key" : "query";
  const keys = kept[side];
  const isTranslator = model?.kind === "translator";
  const where = isTranslator ? ` in ${layer}` : " in all heads";
  const named = token(side, shown[side].at(-1));
  const links = `${token("query", shown.query.at(-1))} → ${token("key", shown.key.at(-1))}`;
  const isLink = kept.query.length > 0 && kept.key.length > 0;
  const pair = { queries: kept.query, keys: kept.key };
  const noLink = isLink ? "" : "keep a query and a key first";
  return [
    { switched: "head", words: `head ${head} of ${layer}`, fault: missing, terms: { ...ALL, module: name, heads: [head] } },
    { switched: "layer", words: `all ${heads} heads of ${layer}`, fault: missing, terms: { ...ALL, module: name } },
    {
      switched: "token",
      words: keys.length ? `token ${named}${where}` : "a token",
      fault: keys.length ? (isTranslator ? missing : "") : `keep a ${oneText ? "token" : "key"} first`,
      terms: { ...ALL, module: isTranslator ? name : null, keys },
    },
    {
      switched: "link",
      words: isLink ? `link ${links} in head ${head} of ${layer}` : "a link in this head",
      fault: noLink || missing,
      terms: { ...pair, module: name, heads: [head] },
    },
    {
      switched: "links",
      words: isLink ? `link ${links} in all heads${isTranslator ? ` of ${layer}` : ""}` : "a link in all heads",
      fault: noLink || (isTranslator ? missing : ""),
      terms: { ...pair, module: isTranslator ? name : null, heads: null },
    },
    { switched: "all", words: "all heads, one by one", fault: "", terms: null },
  ];
}

/** Whose output is compared; null for the last token, and for what a translator says. */
export function comparedToken(context: Context, kind: ModelKind): number | null {
  const { query, key } = keptTokens(context);
  return kind === "translator" ? null : (query.at(-1) ?? key.at(-1) ?? null);
}

/** What is compared, in words. */
export function comparedWords(need: Need, context: Context, kind: ModelKind): string {
  if (kind === "translator") return "what the translator says";
  const token = comparedToken(context, kind);
  const { map } = context.state();
  const kept = keptOf(context, map);
  const side: Side = kept.query.length ? "query" : "key";
  const shown = kept[side].at(-1);
  const named = token === null || shown === undefined ? "the last token" : `token ${whole(token)} “${tokenWords(need, context, side, shown)}”`;
  return kind === "encoder" ? `the state of ${named} after the last layer` : `what follows ${named}`;
}

/** What is asked; undefined while a text is missing. */
export function requestOf(context: Context, store: EffectStore, { terms }: Offer): EffectRequest | undefined {
  const { model, text, choices } = store;
  if (!model || !text) return undefined;
  const needsText = choices.replace === "mean" || choices.replace === "before";
  if (needsText && !choices.reference.trim()) return undefined;
  const token = comparedToken(context, model.kind);
  return { text, token, terms, replace: choices.replace, reference: needsText ? choices.reference : null };
}

/** Why a model does not read what the record is of; "" where it does. A translator's sides have their own lengths. */
export function lengthFault(context: Context, { model }: EffectStore, { tokens }: EffectCost): string {
  const { map } = context.state();
  const { queries } = context.tokenMaps?.[map] ?? context.meta.maps[map];
  if (model?.kind === "translator" || tokens === queries) return "";
  return `The model reads ${whole(tokens)} tokens here, and the record has ${whole(queries)}: it is of another text, or of another model.`;
}

function tokenWords(need: Need, context: Context, side: Side, index: number): string {
  const token = context.tokens.at(need, context.state().map, side, index);
  return token === undefined ? "…" : visible(token, 24);
}
