/** Formats tokens, names and numbers for display; invisible characters become visible signs. */

const LONGEST = 64;

// Control characters, bidirectional marks and isolates, zero-width characters, the byte-order mark, soft hyphen,
// line and paragraph separators, interlinear marks and tags.
const HIDDEN = new RegExp(
  "[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f" +
    "\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]",
  "gu",
);

/** The token with spaces as ␣, control characters as pictures, marks as ⟨U+202E⟩; at most `longest` of it. */
export function visible(token: string, longest = LONGEST): string {
  // Cut first: a token may be of megabytes. Halves of surrogate pairs are dropped with the cut.
  const cut = token.length > longest;
  let text = cut ? token.slice(0, longest - 1).replace(/[\ud800-\udbff]$/, "") : token;
  text = text.replace(/ /g, "␣").replace(HIDDEN, shown);
  if (text.length > 2 * longest) text = text.slice(0, 2 * longest);
  return cut ? `${text}…` : text || "∅";
}

/** As `visible`, with spaces left as they are: for names and sentences. */
export function plain(text: string, longest = LONGEST): string {
  return visible(text, longest).replace(/␣/g, " ");
}

function shown(character: string): string {
  const code = character.codePointAt(0) as number;
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** A weight in four figures. */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : value.toFixed(size >= 10 ? 2 : 4);
}

export function whole(value: number): string {
  return value.toLocaleString("en-GB");
}

/** A dotted name of few letters: "dec.0.cro" of "decoder.blocks.0.cross_attention". */
export function abbreviated(name: string): string {
  const parts = name.split(".").filter((part, at, all) => !/^(blocks?|layers?|h)$/.test(part) || !/^\d/.test(all[at + 1] ?? ""));
  return parts.length > 1 ? parts.map((part) => part.slice(0, 3)).join(".") : name;
}

/** Names with the dotted parts that all share left out: layer.0, layer.1, ... */
export function shortNames(names: string[]): string[] {
  const parts = names.map((name) => plain(name, 200).split("."));
  const distinct = new Set(names);
  if (distinct.size < 2) return parts.map((part) => part.join("."));
  const shortest = Math.min(...parts.map((part) => part.length));
  let before = 0;
  while (before < shortest - 1 && parts.every((part) => part[before] === parts[0][before])) before += 1;
  let after = 0;
  while (after < shortest - 1 - before && parts.every((part) => part.at(-1 - after) === parts[0].at(-1 - after)))
    after += 1;
  // A bare number says nothing; it keeps the word before it.
  if (before > 0 && parts.every((part) => /^\d+$/.test(part[before]))) before -= 1;
  return parts.map((part) => part.slice(before, part.length - after).join("."));
}

/** What a map is of, such as "self attention" or "linear self attention". */
export function attentionWords(map: { operator?: string; kind: string }): string {
  return `${map.operator ? `${plain(map.operator, 30)} ` : ""}${map.kind} attention`;
}
