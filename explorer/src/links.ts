/** Links between the words of a sentence and its translation: from weights by a method, and held against gold. */

import type { Gold } from "./types.ts";

/** (source word or key, target word or query), as Python has them. */
export type Pair = [source: number, target: number];

export const METHODS = ["argmax", "mutual", "grow-diag", "threshold"] as const;
export type Method = (typeof METHODS)[number];

/** Weights of so many rows and columns, row by row; NaN where a pair does not exist. */
export interface Weights {
  rows: number;
  columns: number;
  data: Float32Array;
}

/** How many words the numbers of a side's tokens name. */
export function wordCount(words: readonly number[]): number {
  return words.reduce((most, word) => Math.max(most, word), -1) + 1;
}

/**
 * Weights between words: sums over the keys of a word, means over its queries. The number of a word may be below 0, for
 * none. A pair of words of which no pair of tokens exists stays NaN.
 */
export function wordWeights(weights: Weights, queryWords: readonly number[], keyWords: readonly number[]): Weights {
  const [rows, columns] = [wordCount(queryWords), wordCount(keyWords)];
  const data = new Float32Array(rows * columns).fill(NaN);
  const pieces = new Float32Array(rows);
  for (const word of queryWords) if (word >= 0) pieces[word] += 1;
  for (let row = 0; row < weights.rows; row += 1) {
    const word = queryWords[row];
    if (word < 0) continue;
    for (let column = 0; column < weights.columns; column += 1) {
      const value = weights.data[row * weights.columns + column];
      if (keyWords[column] < 0 || value !== value) continue;
      const cell = word * columns + keyWords[column];
      data[cell] = (data[cell] || 0) + value / pieces[word];
    }
  }
  return { rows, columns, data };
}

/** The links that a method makes of weights, in the order of their sources; of equal weights the first is taken. */
export function linked(weights: Weights, method: Method, threshold: number): Pair[] {
  const { rows, columns, data } = weights;
  const found = new Set<number>();
  if (method === "threshold") {
    data.forEach((value, cell) => value >= threshold && value > 0 && found.add(cell));
  } else {
    const forth = greatest(rows, columns, (row, column) => row * columns + column, data);
    if (method === "argmax") for (const cell of forth) found.add(cell);
    else {
      const back = greatest(columns, rows, (column, row) => row * columns + column, data);
      for (const cell of forth) if (back.has(cell)) found.add(cell);
      if (method === "grow-diag") grow(found, new Set([...forth, ...back]), rows, columns);
    }
  }
  const pairs = [...found].map((cell): Pair => [cell % columns, Math.floor(cell / columns)]);
  return pairs.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

/** The cell of the greatest weight of each line that has any above 0. */
function greatest(
  lines: number,
  length: number,
  cell: (line: number, at: number) => number,
  data: Float32Array,
): Set<number> {
  const found = new Set<number>();
  for (let line = 0; line < lines; line += 1) {
    let best = -1;
    for (let at = 0; at < length; at += 1) {
      const value = data[cell(line, at)];
      if (value > 0 && (best < 0 || value > data[best])) best = cell(line, at);
    }
    if (best >= 0) found.add(best);
  }
  return found;
}

/** Adds cells of `all` beside those found, sides and corners, for as long as their row or column has none yet. */
function grow(found: Set<number>, all: Set<number>, rows: number, columns: number): void {
  const taken = { rows: new Set<number>(), columns: new Set<number>() };
  const take = (cell: number) => {
    found.add(cell);
    taken.rows.add(Math.floor(cell / columns));
    taken.columns.add(cell % columns);
  };
  for (const cell of found) take(cell);
  for (let before = -1; before < found.size; ) {
    before = found.size;
    for (const cell of [...found].sort((a, b) => a - b)) {
      for (const near of neighbours(cell, rows, columns)) {
        const free = !taken.rows.has(Math.floor(near / columns)) || !taken.columns.has(near % columns);
        if (free && all.has(near)) take(near);
      }
    }
  }
}

const STEPS = [
  [-1, 0],
  [0, -1],
  [1, 0],
  [0, 1],
  [-1, -1],
  [-1, 1],
  [1, -1],
  [1, 1],
];

function neighbours(cell: number, rows: number, columns: number): number[] {
  const [row, column] = [Math.floor(cell / columns), cell % columns];
  return STEPS.map(([down, across]) => [row + down, column + across])
    .filter(([y, x]) => y >= 0 && x >= 0 && y < rows && x < columns)
    .map(([y, x]) => y * columns + x);
}

export interface Scores {
  links: number;
  sure: number;
  /** How many links are sure, and how many are sure or possible. */
  inSure: number;
  inPossible: number;
  /** NaN where there is nothing to divide by. */
  precision: number;
  recall: number;
  /** 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|) of the links A, the sure S and the possible P, S part of P. */
  errorRate: number;
}

/** Och and Ney's precision |A ∩ P| / |A|, recall |A ∩ S| / |S| and alignment error rate. */
export function scores(links: readonly Pair[], gold: Gold): Scores {
  const { sure, possible } = goldSets(gold);
  const inSure = links.filter((link) => sure.has(link.join())).length;
  const inPossible = links.filter((link) => possible.has(link.join())).length;
  return {
    links: links.length,
    sure: sure.size,
    inSure,
    inPossible,
    precision: inPossible / links.length,
    recall: inSure / sure.size,
    errorRate: 1 - (inSure + inPossible) / (links.length + sure.size),
  };
}

/** Links as "source,target"; what is sure is possible too. */
export function goldSets(gold: Gold): { sure: Set<string>; possible: Set<string> } {
  const sure = new Set(gold.sure.map((link) => link.join()));
  return { sure, possible: new Set([...sure, ...gold.possible.map((link) => link.join())]) };
}
