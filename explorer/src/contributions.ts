/** A source of contributions in place of weights, and why some atlases have none. */

import { type Meta, type Reduce, type Region, type Source } from "./types.ts";

export const FORMULA = "‖α·v·W_o‖";
export const CONTRIBUTION_MEANING =
  "contribution ‖α·v·W_o‖: the weight α of a key times the length of its value v after the output projection W_o of the " +
  "head, which is the length of what the key adds to the output (Kobayashi et al. 2020). In the unit of the model's states; " +
  "the contributions of a row do not sum to 1, and those of a word are the sum over its tokens.";

/** Of longer maps the pooled cells would take minutes: all pairs are read for each head. */
export const MOST_PAIRS = 2 ** 29;

/** Why contributions cannot be shown, in words; "" where they can. */
export function contributionFault(source: Source, meta: Meta): string {
  const { maps } = meta;
  const without = maps.filter(({ norms }) => !norms).length;
  if (without === maps.length) return "no norms of values are in this record: record the model itself";
  if (without) return `no norms of values are known of ${without} of the ${maps.length} layers: more than a projection follows their heads`;
  if (!source.norms || !source.pooledContributions) return "no norms of values are in this page: a served page has them";
  if (maps.some(({ queries, keys }) => queries * keys > MOST_PAIRS)) return "of so many tokens the whole maps would take minutes each";
  return "";
}

/** The same source, with contributions as its numbers. Needs one without a fault. */
export function contributions(source: Source, meta: Meta): { source: Source; meta: Meta } {
  const known = new Map<string, Promise<Float32Array>>();
  const norms = (map: number, head: number): Promise<Float32Array> => {
    const key = `${map}/${head}`;
    const asked = known.get(key) ?? source.norms?.(map, head) ?? missing();
    known.set(key, asked);
    asked.catch(() => known.delete(key));
    return asked;
  };
  const asked = {
    meta: async () => told,
    overview: undefined,
    pooled: (map: number, head: number, level: number, reduce: Reduce, signal?: AbortSignal) =>
      source.pooledContributions?.(map, head, level, reduce, signal) ?? missing(),
    weights: async (map: number, head: number, region: Region, signal?: AbortSignal) => {
      const [weights, all] = await Promise.all([source.weights(map, head, region, signal), norms(map, head)]);
      return scaled(weights, all.subarray(region.column0, region.column1));
    },
    profile: async (map: number, head: number, which: string, signal?: AbortSignal) => {
      if (which !== "received") throw new Error(`there is no ${which} of contributions`);
      const [received, all] = await Promise.all([source.profile(map, head, which, signal), norms(map, head)]);
      return scaled(received, all);
    },
  };
  const told: Meta = { ...meta, quantity: "contribution", exact: "exact contributions", overview: false, profiles: ["received"] };
  return { source: Object.assign(Object.create(source) as Source, asked), meta: told };
}

async function missing(): Promise<never> {
  throw new Error("the source has no norms of values");
}

/** Row after row times the numbers; no pair and NaN stay what they are, also with a norm of 0. */
export function scaled(rows: Float32Array, by: Float32Array): Float32Array {
  return rows.map((value, at) => (Number.isFinite(value) ? value * by[at % by.length] : value));
}
