/** The anywidget module of the explorer: `render` mounts it in a notebook's cell. */

import { make } from "./dom.ts";
import { mount } from "./mount.ts";
import { notebookScheme } from "./scheme.ts";
import { type Answer, Messages, told } from "./sources/messages.ts";
import { decode, encode } from "./state.ts";

/** A notebook's model, as anywidget hands it over. */
interface WidgetModel {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(message: unknown): void;
  on(event: "msg:custom", listener: Heard): void;
  on(event: "change:state", listener: () => void): void;
  off?(event: string, listener: unknown): void;
}

type Heard = (message: Answer, buffers: readonly DataView[]) => void;

const SHARING = "The state of the widget is what is shown: in Python, `shown = atlas.show()`, then `shown.state`.";

/** Shows what the model's kernel has; gives what ends it. */
export async function render({ model, el }: { model: WidgetModel; el: HTMLElement }): Promise<() => void> {
  let heard: Heard = () => undefined;
  const channel = {
    send: (message: unknown) => model.send(message),
    listen: (listener: Heard) => model.on("msg:custom", (heard = listener)),
  };
  const root = make("div", { class: "regard-cell", on: { keydown: keepIn } });
  const height = Number(model.get("height"));
  if (height > 0) root.style.height = `${height}px`;
  el.append(root);
  const given = () => String(model.get("state") ?? "");
  const options = { scheme: notebookScheme(), sharing: SHARING };
  const explorer = await mount(root, told(new Messages(channel)), given(), options);
  hideStill(el, String(model.get("hides") ?? ""));
  const unlisten = explorer.listen((state) => {
    if (encode(state) === given()) return;
    model.set("state", encode(state));
    model.save_changes();
  });
  const restored = () => {
    if (encode(explorer.state) !== given()) explorer.restore(decode(given()));
  };
  model.on("change:state", restored);
  return () => {
    model.off?.("msg:custom", heard);
    model.off?.("change:state", restored);
    unlisten();
    explorer.destroy();
  };
}

/** Letters are commands to a notebook, which would add and delete cells; but it may have its own keys to save and run. */
function keepIn(event: KeyboardEvent): void {
  const command = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
  if (!command) event.stopPropagation();
}

/** Hides the picture that a saved notebook shows in the widget's place: the nearest one whose data end so. */
function hideStill(el: HTMLElement, ending: string): void {
  if (!ending) return;
  for (let around = el.parentElement; around; around = around.parentElement) {
    const stills = [...around.querySelectorAll("img")].filter((image) => image.src.endsWith(ending));
    for (const still of stills) still.style.display = "none";
    if (stills.length) return;
  }
}
