/** The notice where the tokens of two compared atlases differ. */

import { make } from "../dom.ts";
import type { HeadField } from "../field.ts";
import { visible, whole } from "../text.ts";
import type { Side } from "../types.ts";

/** So many tokens of each side are compared, and so many of those that differ are named. */
const MOST_TOKENS = 4096;
const MOST_NAMED = 4;

export class Differing {
  readonly element = make("p", { class: "differing", set: { role: "status", hidden: true } });
  private asked = "";

  /** Looks at the first two heads, if they are of two atlases. */
  update(heads: readonly HeadField[]): void {
    const [first, second] = heads;
    const apart = first && second && first.context !== second.context;
    const asked = apart ? `${first.title} / ${second.title}` : "";
    if (asked === this.asked) return;
    this.asked = asked;
    this.say("");
    if (apart) void this.look(first, second, asked);
  }

  destroy(): void {
    this.asked = "";
  }

  private async look(first: HeadField, second: HeadField, asked: string): Promise<void> {
    const words = sizes(first, second) ?? (await differences(first, second).catch(() => ""));
    if (asked === this.asked) this.say(words);
  }

  private say(words: string): void {
    this.element.textContent = words;
    this.element.hidden = !words;
  }
}

function sizes({ map: a }: HeadField, { map: b }: HeadField): string | undefined {
  if (a.queries === b.queries && a.keys === b.keys) return undefined;
  const shapes = [a, b].map((map) => `${whole(map.queries)} × ${whole(map.keys)}`);
  return `The sizes differ, ${shapes.join(" and ")}: there is no difference of weights to show.`;
}

async function differences(first: HeadField, second: HeadField): Promise<string> {
  const own = first.map.kind === "self";
  const sides: readonly Side[] = own ? ["query"] : ["query", "key"];
  const told = await Promise.all(sides.map((side) => onSide(first, second, side, own ? "token" : side)));
  const parts = told.filter(Boolean);
  return parts.length ? `Not the same words: ${parts.join("; ")}.` : "";
}

async function onSide(first: HeadField, second: HeadField, side: Side, name: string): Promise<string> {
  const count = Math.min(side === "query" ? first.map.queries : first.map.keys, MOST_TOKENS);
  const [a, b] = await Promise.all(
    [first, second].map(({ context, mapIndex }) => context.tokens.range(mapIndex, side, 0, count)),
  );
  const found = [...a.keys()].filter((at) => a[at] !== b[at]);
  if (!found.length) return "";
  const named = found.slice(0, MOST_NAMED).map((at) => `${whole(at)} ${visible(a[at], 16)} | ${visible(b[at], 16)}`);
  const more = found.length > named.length ? ` and ${whole(found.length - named.length)} more` : "";
  return `${name} ${named.join(", ")}${more}`;
}
