/** Colours and dashes of several heads in one picture, which are told apart by either. */

import type { Shape } from "./shapes.ts";
import { cutToWidth } from "./shapes.ts";

export interface HeadStyle {
  stroke: string;
  dash?: number[];
}

/** Colours that are told apart without red and green too (Okabe and Ito 2008). */
const STYLES: readonly HeadStyle[] = [
  { stroke: "#0072b2" },
  { stroke: "#d55e00", dash: [9, 3] },
  { stroke: "#009e73", dash: [4, 3] },
  { stroke: "#cc79a7", dash: [10, 3, 2, 3] },
  { stroke: "#e69f00", dash: [2, 3] },
  { stroke: "#56b4e9", dash: [14, 5] },
];

export const LEGEND_LINE = 18;

export function headStyle(at: number): HeadStyle {
  return STYLES[at % STYLES.length];
}

/** A line of each head beside its name, below each other. */
export function headLegend(names: readonly string[], x: number, y: number, width: number, ink: string): Shape[] {
  return names.flatMap((name, at): Shape[] => {
    const middle = y + at * LEGEND_LINE;
    const { stroke, dash } = headStyle(at);
    const text = cutToWidth(name, width - 46, {});
    return [
      { kind: "path", points: [x, middle, x + 38, middle], stroke, width: 3, dash },
      { kind: "text", x: x + 46, y: middle, text, colour: ink },
    ];
  });
}
