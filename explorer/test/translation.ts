/** Three translations of one sentence, in tokens that make words, one of them with links that people made. */

import { checkedMeta, type AttentionMap, type Side } from "../src/types.ts";
import { levelsOf, noise, pooling, type SyntheticAtlas, type SyntheticMap } from "./synthetic.ts";

/** Tokens with the numbers of their words. */
interface Line {
  tokens: string[];
  words: number[];
}

const SOURCE: Line = {
  tokens: ["▁The", "▁black", "▁cat", "▁sle", "eps", "▁on", "▁the", "▁chair", "."],
  words: [0, 1, 2, 3, 3, 4, 5, 6, 6],
};

const SAID: (Line & { text: string; score: number })[] = [
  {
    text: "Le chat noir dort sur la chaise.",
    score: -0.4,
    tokens: ["▁Le", "▁chat", "▁noir", "▁do", "rt", "▁sur", "▁la", "▁chaise", ".", "</s>"],
    words: [0, 1, 2, 3, 3, 4, 5, 6, 6, -1],
  },
  {
    text: "Le chat dort dans la chaise noire.",
    score: -1.1,
    tokens: ["▁Le", "▁chat", "▁do", "rt", "▁dans", "▁la", "▁chaise", "▁noire", ".", "</s>"],
    words: [0, 1, 2, 2, 3, 4, 5, 6, 6, -1],
  },
  {
    text: "Le chat noir dort.",
    score: -1.6,
    tokens: ["▁Le", "▁chat", "▁noir", "▁do", "rt", ".", "</s>"],
    words: [0, 1, 2, 3, 3, 3, -1],
  },
];

const GOLD: AttentionMap["gold"] = {
  sure: [
    [0, 0],
    [2, 1],
    [1, 2],
    [3, 3],
    [4, 4],
    [6, 6],
  ],
  possible: [
    [5, 5],
    [5, 6],
  ],
};

export function translation(): SyntheticAtlas {
  const maps: SyntheticMap[] = [made("encoder.0.attention", SOURCE, SOURCE, { kind: "self" })];
  for (const layer of [0, 1]) {
    SAID.forEach((said, rank) => {
      const { text, score } = said;
      const hypothesis = { rank, text, score };
      const gold = rank === 0 ? GOLD : undefined;
      maps.push(made(`decoder.${layer}.cross_attention`, said, SOURCE, { kind: "cross", call: rank, hypothesis, gold }));
    });
  }
  return { meta: checkedMeta({ version: 1, title: "a beam", maps: maps.map(({ map }) => map) }), maps };
}

/** One translation with all attention of its decoder, whose rows of self-attention are what it has read. */
export function forced(): SyntheticAtlas {
  const [said] = SAID;
  const read: Line = { tokens: ["<s>", ...said.tokens.slice(0, -1)], words: [-1, ...said.words.slice(0, -1)] };
  const maps = [
    made("encoder.0.attention", SOURCE, SOURCE, { texts: [0, 0] }),
    made("decoder.0.self_attention", read, read, { texts: [1, 1] }),
    made("decoder.0.cross_attention", said, SOURCE, { kind: "cross", texts: [2, 0] }),
    made("decoder.1.cross_attention", said, SOURCE, { kind: "cross", texts: [2, 0] }),
  ];
  return { meta: checkedMeta({ version: 1, title: said.text, maps: maps.map(({ map }) => map) }), maps };
}

function made(name: string, query: Line, key: Line, more: Partial<AttentionMap>): SyntheticMap {
  const [queries, keys] = [query.tokens.length, key.tokens.length];
  const map: AttentionMap = {
    name,
    call: 0,
    sequence: 0,
    kind: "self",
    heads: 3,
    queries,
    keys,
    ...levelsOf(queries, keys),
    metrics: { entropy: [1.1, 0.9, 0.7] },
    roles: [],
    words: [query.words, key.words],
    ...more,
  };
  const raw = (head: number, i: number, j: number) =>
    Math.exp(-Math.abs((i * keys) / queries - j) * (1 + head) + 2 * noise(head, i, j, name.length));
  const weight = (head: number, i: number, j: number) =>
    raw(head, i, j) / key.tokens.reduce((sum, _, k) => sum + raw(head, i, k), 0);
  const token = (side: Side, index: number) => (side === "query" ? query : key).tokens[index];
  return { map, token, weight, pooled: pooling(map, weight) };
}
