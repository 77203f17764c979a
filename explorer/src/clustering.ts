/** Heads in the order of a tree that joins those that are alike. */

/** Rows of weights, row by row, each row's numbers its share of every column: one head. */
export interface Shares {
  rows: number;
  columns: number;
  data: Float32Array;
}

/** More heads than these are not ordered: their number of pairs grows with its square. */
export const MOST_HEADS = 1024;

/** Cells of all pairs together that are compared; maps are pooled further until it is no more. */
const MOST_CELLS = 2 ** 24;

/** Each row divided by its sum, rows of none left 0; NaN counts as 0. `widths` tells how many keys a column has. */
export function shares(data: Float32Array, rows: number, columns: number, widths: (column: number) => number): Shares {
  const result = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row += 1) {
    let sum = 0;
    for (let column = 0; column < columns; column += 1) {
      const mass = (data[row * columns + column] || 0) * widths(column);
      result[row * columns + column] = mass;
      sum += mass;
    }
    if (sum > 0) for (let column = 0; column < columns; column += 1) result[row * columns + column] /= sum;
  }
  return { rows, columns, data: result };
}

/** So coarse that all pairs of `count` heads can be compared at once. */
export function coarser(of: Shares, count: number): Shares {
  let { rows, columns, data } = of;
  while (((count * count) / 2) * rows * columns > MOST_CELLS && Math.max(rows, columns) > 4) {
    const [down, across] = [Math.ceil(rows / 2), Math.ceil(columns / 2)];
    const result = new Float32Array(down * across);
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        // The mean of the rows; the last may have no other beside it.
        const pair = row === rows - 1 && rows % 2 ? 1 : 2;
        result[(row >> 1) * across + (column >> 1)] += data[row * columns + column] / pair;
      }
    }
    [rows, columns, data] = [down, across, result];
  }
  return { rows, columns, data };
}

/** −w ln w, 0 of 0. */
const information = (weight: number): number => (weight > 0 ? -weight * Math.log(weight) : 0);

/**
 * H((P + Q) / 2) − (H(P) + H(Q)) / 2 of the rows P and Q of each two heads, their mean, in nats: (heads, heads). It is
 * 0 for heads that are alike, and ln 2 for those that never attend to the same, or whose maps have other sizes.
 */
export function divergences(heads: readonly Shares[]): Float32Array {
  const own = heads.map(({ data }) => data.reduce((sum, weight) => sum + information(weight), 0));
  const result = new Float32Array(heads.length ** 2);
  for (let a = 0; a < heads.length; a += 1) {
    for (let b = a + 1; b < heads.length; b += 1) {
      const [one, other] = [heads[a], heads[b]];
      let value = Math.LN2;
      if (one.rows === other.rows && one.columns === other.columns) {
        let mixed = 0;
        for (let i = 0; i < one.data.length; i += 1) mixed += information((one.data[i] + other.data[i]) / 2);
        value = Math.min(Math.max((mixed - (own[a] + own[b]) / 2) / one.rows, 0), Math.LN2);
      }
      result[a * heads.length + b] = value;
      result[b * heads.length + a] = value;
    }
  }
  return result;
}

interface Cluster {
  members: number[];
  /** The mean distance to every other cluster that is left, by its first member. */
  distances: Float64Array;
}

/**
 * The leaves of the tree of average linkage, from left to right: the two clusters whose members are nearest on average
 * are joined, again and again. Of equally near ones the first are; the one with the earlier first member stands left.
 *
 * Pairs of clusters that are each other's nearest are joined as a chain of nearest neighbours meets them, which gives
 * the same tree in a time that grows with the square of the count (Murtagh 1983, A Survey of Recent Advances in
 * Hierarchical Clustering Algorithms).
 */
export function leafOrder(distances: Float32Array, count: number): number[] {
  const clusters = new Map<number, Cluster>();
  for (let at = 0; at < count; at += 1) {
    clusters.set(at, { members: [at], distances: Float64Array.from(distances.subarray(at * count, (at + 1) * count)) });
  }
  const chain: number[] = [];
  while (clusters.size > 1) {
    if (!chain.length) chain.push(Math.min(...clusters.keys()));
    const last = chain[chain.length - 1];
    const before = chain[chain.length - 2];
    const next = nearest(clusters, last, before);
    if (next !== before) {
      chain.push(next);
      continue;
    }
    chain.splice(-2);
    join(clusters, Math.min(last, next), Math.max(last, next));
  }
  return [...clusters.values()].flatMap(({ members }) => members);
}

/** The cluster nearest to one; of equally near ones `preferred`, so that the chain ends, else the first. */
function nearest(clusters: Map<number, Cluster>, from: number, preferred: number | undefined): number {
  const { distances } = clusters.get(from) as Cluster;
  let best = preferred ?? -1;
  for (const at of clusters.keys()) if (at !== from && (best < 0 || distances[at] < distances[best])) best = at;
  return best;
}

function join(clusters: Map<number, Cluster>, left: number, right: number): void {
  const [a, b] = [clusters.get(left) as Cluster, clusters.get(right) as Cluster];
  const [m, n] = [a.members.length, b.members.length];
  clusters.delete(right);
  for (const [at, other] of clusters) {
    if (at === left) continue;
    const mean = (m * a.distances[at] + n * b.distances[at]) / (m + n);
    a.distances[at] = mean;
    other.distances[left] = mean;
  }
  a.members = [...a.members, ...b.members];
}
