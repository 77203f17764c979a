/** The divergence of heads, and an order by average linkage in which heads that are alike stand together. */

/** Rows of weights, row by row: one head. `rest` is what each row lacks to 1: the weight of a sink, or an empty row. */
export interface Shares {
  rows: number;
  columns: number;
  data: Float32Array;
  rest: Float32Array;
}

/** A row that sums to 1 but for this sums to 1: pooled weights are rounded to 0.4 %. */
const ROUNDING = 1e-2;

/** More heads than these are not ordered: their number of pairs grows with its square. */
export const MOST_HEADS = 1024;

/** Cells of all pairs together that are compared; maps are pooled further until it is no more. */
const MOST_CELLS = 2 ** 24;

/**
 * The weights of each row in every column of `widths(column)` keys, from their means; NaN counts as 0. Rows that sum to 1
 * but for rounding, or to more, are divided by their sum.
 */
export function shares(data: Float32Array, rows: number, columns: number, widths: (column: number) => number): Shares {
  const result = new Float32Array(rows * columns);
  const rest = new Float32Array(rows);
  for (let row = 0; row < rows; row += 1) {
    let sum = 0;
    for (let column = 0; column < columns; column += 1) {
      const mass = (data[row * columns + column] || 0) * widths(column);
      result[row * columns + column] = mass;
      sum += mass;
    }
    if (sum < 1 - ROUNDING) rest[row] = 1 - sum;
    else for (let column = 0; column < columns; column += 1) result[row * columns + column] /= sum;
  }
  return { rows, columns, data: result, rest };
}

/** So coarse that all pairs of `count` heads can be compared at once. */
export function coarser(of: Shares, count: number): Shares {
  let { rows, columns, data, rest } = of;
  while (((count * count) / 2) * rows * columns > MOST_CELLS && Math.max(rows, columns) > 4) {
    const [down, across] = [Math.ceil(rows / 2), Math.ceil(columns / 2)];
    const result = new Float32Array(down * across);
    const rests = new Float32Array(down);
    for (let row = 0; row < rows; row += 1) {
      // The mean of the rows; the last may have no other beside it.
      const pair = row === rows - 1 && rows % 2 ? 1 : 2;
      rests[row >> 1] += rest[row] / pair;
      for (let column = 0; column < columns; column += 1) {
        result[(row >> 1) * across + (column >> 1)] += data[row * columns + column] / pair;
      }
    }
    [rows, columns, data, rest] = [down, across, result, rests];
  }
  return { rows, columns, data, rest };
}

/** −w ln w, 0 of 0. */
const information = (weight: number): number => (weight > 0 ? -weight * Math.log(weight) : 0);

/**
 * H((P + Q) / 2) − (H(P) + H(Q)) / 2 of the rows P and Q of each two heads, their mean, in nats: (heads, heads). It is
 * 0 for heads that are alike, and ln 2 for those that never attend to the same, or whose maps have other sizes. What a
 * row lacks to 1 is one more key. It is `regard.heads.head_divergence`; test/heads.json holds both to the same cases.
 */
export function divergences(heads: readonly Shares[]): Float32Array {
  const entropy = (of: Float32Array): number => of.reduce((sum, weight) => sum + information(weight), 0);
  const own = heads.map(({ data, rest }) => entropy(data) + entropy(rest));
  const result = new Float32Array(heads.length ** 2);
  for (let a = 0; a < heads.length; a += 1) {
    for (let b = a + 1; b < heads.length; b += 1) {
      const [one, other] = [heads[a], heads[b]];
      let value = Math.LN2;
      if (one.rows === other.rows && one.columns === other.columns) {
        let mixed = 0;
        for (let i = 0; i < one.data.length; i += 1) mixed += information((one.data[i] + other.data[i]) / 2);
        for (let i = 0; i < one.rows; i += 1) mixed += information((one.rest[i] + other.rest[i]) / 2);
        value = Math.min(Math.max((mixed - (own[a] + own[b]) / 2) / one.rows, 0), Math.LN2);
      }
      result[a * heads.length + b] = value;
      result[b * heads.length + a] = value;
    }
  }
  return result;
}

/**
 * An order in which heads that are alike stand together: the leaves of average linkage (UPGMA). The two nearest clusters
 * are joined, again and again, of equally near ones the first, and turned so that the ends that meet are the nearest. It
 * is `regard.heads.similarity_order`; test/heads.json holds both to the same cases.
 *
 * Each cluster remembers the nearest of those after it, which takes a time that mostly grows with the square of the count
 * (Anderberg 1973, Cluster Analysis for Applications).
 */
export function leafOrder(distances: Float32Array, count: number): number[] {
  const between = Float64Array.from(distances);
  const chains = Array.from({ length: count }, (_, head) => [head]);
  const nearest = new Int32Array(count).fill(-1);
  let left = chains.map(([head]) => head);
  const distance = (cluster: number) => between[cluster * count + nearest[cluster]];
  const seek = (cluster: number) => {
    nearest[cluster] = -1;
    for (const other of left) {
      if (other > cluster && (nearest[cluster] < 0 || between[cluster * count + other] < distance(cluster))) {
        nearest[cluster] = other;
      }
    }
  };
  left.forEach(seek);
  while (left.length > 1) {
    const first = left.reduce((best, cluster) => {
      return nearest[cluster] >= 0 && distance(cluster) < distance(best) ? cluster : best;
    });
    const second = nearest[first];
    const [m, n] = [chains[first].length, chains[second].length];
    left = left.filter((cluster) => cluster !== second);
    for (const other of left) {
      const mean = (m * between[first * count + other] + n * between[second * count + other]) / (m + n);
      between[first * count + other] = mean;
      between[other * count + first] = mean;
    }
    chains[first] = nearestEnds(chains[first], chains[second], distances, count);
    for (const cluster of left) {
      if (cluster === first || nearest[cluster] === first || nearest[cluster] === second) seek(cluster);
      else if (cluster < first) {
        const mean = between[cluster * count + first];
        const nearer = mean < distance(cluster) || (mean === distance(cluster) && first < nearest[cluster]);
        if (nearer) nearest[cluster] = first;
      }
    }
  }
  return left.flatMap((cluster) => chains[cluster]);
}

/** Two chains, joined where their ends are nearest: of equally near ends, turned as little as possible. */
function nearestEnds(left: number[], right: number[], distances: Float32Array, count: number): number[] {
  const [leftTurned, rightTurned] = [[...left].reverse(), [...right].reverse()];
  const ways = [left, leftTurned].flatMap((one) => [right, rightTurned].map((other) => [...one, ...other]));
  const gap = (way: number[]) => distances[way[left.length - 1] * count + way[left.length]];
  return ways.reduce((best, way) => (gap(way) < gap(best) ? way : best));
}
