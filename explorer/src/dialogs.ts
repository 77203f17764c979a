/** Native dialogs, and the help: focus stays inside, Escape closes. */

import { button, make } from "./dom.ts";
import { FILES, KEPT_MEANINGS, MARKS, METRIC_MEANINGS, ROWS_OF_METRICS } from "./meanings.ts";

const KEYS: [string, string][] = [
  ["← → or j k", "previous, next head; with the focus on a map j k alone"],
  ["↑ ↓", "previous, next layer"],
  ["Shift + arrows", "move the map"],
  ["+ −", "zoom in, out"],
  ["0", "the whole map"],
  ["g", "go to an index or a token, and keep it"],
  ["Arrows on a map", "keep the cell beside: press Tab until the map has the focus"],
  ["Backspace", "keep nothing"],
  ["/", "search tokens; in the grid: layers"],
  ["Enter", "open the head that has the focus"],
  ["Esc", "back to the grid"],
  ["h l v c t", "heat map, lines, text, compare, table"],
  ["m", "one head, the mean of its layer, the mean of all layers of its kind"],
  ["p", "pin or unpin for comparison"],
  ["d", "difference of the first two"],
  [", .", "previous, next atlas"],
  ["b", "this head beside the same one of the atlas before"],
  ["e", "edit the text that the model reads"],
  ["a", "next alignment: none, argmax, mutual, grow-diag, threshold"],
  ["o", "gold links on or off"],
  ["w", "words or their tokens"],
  ["[ ]", "previous, next translation of the beam"],
  ["s", "next scale: linear, square root, logarithm"],
  ["i", "weights or contributions"],
  ["z", "switch off a head, a layer, a token or a link"],
  ["r", "pooled by max or mean"],
  ["n", "divide each row by its greatest weight"],
  ["x", "clip the greatest hundredth"],
  ["u", "colours of what is in sight, or of the whole map"],
  ["?", "this help"],
];

export function openHelp(root: HTMLElement, sharing: string): void {
  const metrics = Object.entries(METRIC_MEANINGS).map(([name, words]): [string, string] => [name.replace(/_/g, " "), words]);
  openDialog(
    root,
    "Help",
    ...section("Keys", KEYS, true),
    ...section("Numbers", [...KEPT_MEANINGS, ...metrics]),
    make("p", { class: "muted" }, ROWS_OF_METRICS),
    ...section("Marks", MARKS),
    ...section("Files", FILES),
    make("h3", {}, "Pointer and address"),
    make(
      "p",
      { class: "muted" },
      `Drag or pinch to move, turn the wheel to zoom, click a cell or the name of a token to keep it, once more to let it go; with Shift beside what is kept. ${sharing}`.trim(),
    ),
  );
}

/** A title over a table of terms and what they mean. */
function section(title: string, rows: readonly [string, string][], keys = false): Node[] {
  const lines = rows.map(([term, words]) => {
    const shown = keys ? make("kbd", {}, term) : term;
    return make("tr", {}, make("th", { set: { scope: "row" } }, shown), make("td", {}, words));
  });
  return [make("h3", {}, title), make("table", { class: "terms" }, make("tbody", {}, ...lines))];
}

/** A dialog that removes itself when it closes, and gives the focus back to the explorer. */
export function openDialog(root: HTMLElement, title: string, ...children: Node[]): HTMLDialogElement {
  const dialog = make("dialog", { set: { "aria-label": title } });
  const close = button("×", () => dialog.close(), { class: "square quiet", set: { "aria-label": "close" } });
  dialog.append(make("header", {}, make("h2", {}, title), close), ...children);
  dialog.addEventListener("close", () => {
    dialog.remove();
    root.focus({ preventScroll: true });
  });
  root.append(dialog);
  dialog.showModal();
  return dialog;
}
