/** Colours of ink and paper, the same for what the style sheet styles and what is drawn. */

export interface Palette {
  paper: string;
  ink: string;
  muted: string;
  line: string;
  accent: string;
  gold: string;
  hatchPaper: string;
  hatchLine: string;
  /** The two colours of the checks that stand for NaN. */
  broken: string;
  brokenPaper: string;
}

const NAMES: Record<keyof Palette, string> = {
  paper: "--paper",
  ink: "--ink",
  muted: "--muted",
  line: "--line",
  accent: "--accent",
  gold: "--gold",
  hatchPaper: "--hatch-paper",
  hatchLine: "--hatch-line",
  broken: "--broken",
  brokenPaper: "--broken-paper",
};

export function paletteOf(element: Element): Palette {
  const style = getComputedStyle(element);
  const entries = Object.entries(NAMES).map(([key, name]) => [key, style.getPropertyValue(name).trim() || "#888888"]);
  return Object.fromEntries(entries) as Palette;
}
