/** The steps of a lecture in Markdown: what is pressed or chosen is in bold, and behind an arrow stands what is seen. */

export interface Step {
  number: number;
  text: string;
  /** A list of choices by its name, and the choice. */
  choose?: [list: string, choice: string];
  press: string[];
  seen: string[];
}

export interface Lesson {
  title: string;
  steps: Step[];
}

/** The sections of a page that have steps. */
export function lessons(markdown: string): Lesson[] {
  return markdown
    .split(/^## /m)
    .slice(1)
    .map((section) => ({ title: section.split("\n")[0], steps: section.split("\n").flatMap((line) => step(line) ?? []) }))
    .filter(({ steps }) => steps.length);
}

/** Of each step what is in bold and what is seen. */
export function parts(markdown: string): string[][] {
  return lessons(markdown).flatMap(({ steps }) => steps.map(({ choose, press, seen }) => [...(choose ?? []), ...press, ...seen]));
}

function step(line: string): Step | undefined {
  const found = /^(\d+)\. (.*) → (.*)$/.exec(line);
  if (!found) return undefined;
  const [, number, text, shown] = found;
  const bold = [...text.matchAll(/\*\*(.+?)\*\*/g)].map((match) => match[1]);
  const seen = [...shown.matchAll(/`([^`]+)`/g)].map((match) => match[1]);
  return bold.length === 2
    ? { number: Number(number), text, choose: [bold[0], bold[1]], press: [], seen }
    : { number: Number(number), text, press: bold, seen };
}
