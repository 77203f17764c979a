/** Elements made without markup, so that no data can become markup. */

type Child = Node | string | undefined | false;
type Listeners = { [K in keyof HTMLElementEventMap]?: (event: HTMLElementEventMap[K]) => void };

interface Settings {
  class?: string;
  /** Attributes; false and undefined are left out. */
  set?: Record<string, string | number | boolean | undefined>;
  on?: Listeners;
}

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  settings: Settings = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (settings.class) element.className = settings.class;
  for (const [name, value] of Object.entries(settings.set ?? {})) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const [name, listener] of Object.entries(settings.on ?? {})) {
    element.addEventListener(name, listener as EventListener);
  }
  element.append(...children.filter((child): child is Node | string => child !== undefined && child !== false));
  return element;
}

export function button(label: string, press: () => void, settings: Settings = {}): HTMLButtonElement {
  return make("button", { ...settings, set: { type: "button", ...settings.set }, on: { click: press } }, label);
}

export interface Choice {
  value: string;
  label: string;
  disabled?: boolean;
}

/** A select with its label; a `bare` one shows no label to the eye, only to readers. */
export function select(
  label: string,
  choices: Choice[],
  value: string,
  change: (value: string) => void,
  bare = false,
): HTMLLabelElement {
  const box = make("select", { on: { change: () => change(box.value) } });
  for (const choice of choices) box.append(make("option", { set: { value: choice.value, disabled: choice.disabled } }, choice.label));
  box.value = value;
  if (bare) box.title = label;
  return make("label", { class: bare ? "field bare" : "field" }, make("span", {}, label), box);
}

export function toggle(label: string, pressed: boolean, press: () => void, title?: string): HTMLButtonElement {
  return button(label, press, { class: "toggle", set: { "aria-pressed": String(pressed), title } });
}

/** A number from a slider, with its value written beside it. */
export function slider(
  label: string,
  range: { min: number; max: number; step: number; value: number },
  change: (value: number) => void,
): HTMLLabelElement {
  const told = make("output", {}, String(range.value));
  const { min, max, step } = range;
  const input = make("input", {
    set: { type: "range", min, max, step },
    on: {
      input: () => {
        told.textContent = input.value;
        change(Number(input.value));
      },
    },
  });
  input.value = String(range.value);
  return make("label", { class: "field" }, make("span", {}, label), input, told);
}

export function replace(element: Element, ...children: Child[]): void {
  element.replaceChildren(
    ...children.filter((child): child is Node | string => child !== undefined && child !== false),
  );
}
