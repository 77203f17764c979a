/** The page of the doctor's findings: filters, keys, explanations beside the findings, and maps in the explorer. */

import { make } from "./dom.ts";
import { browserScheme } from "./scheme.ts";
import { atlasPage, isShown, type Searched, words } from "./finding_filter.ts";

/** The rows of the page: findings in their files. */
interface Row extends Searched {
  element: HTMLElement;
}

interface FileRows {
  element: HTMLElement;
  entry: HTMLElement | null;
  rows: Row[];
}

class FindingsPage {
  private readonly files: FileRows[];
  private readonly search: HTMLInputElement;
  private readonly boxes: HTMLInputElement[];
  private readonly status: HTMLElement;

  constructor(private readonly root: HTMLElement) {
    const found = <E extends Element>(query: string) => root.querySelector<E>(query) as E;
    this.search = found("input[type=search]");
    this.boxes = [...root.querySelectorAll<HTMLInputElement>(".filters input[type=checkbox]")];
    this.status = found("[role=status]");
    this.files = [...root.querySelectorAll<HTMLElement>("section.file")].map((element) => ({
      element,
      entry: root.querySelector(`nav a[href="#${element.id}"]`)?.parentElement ?? null,
      rows: [...element.querySelectorAll<HTMLElement>("article.finding")].map((article) => ({
        element: article,
        severity: article.dataset.severity ?? "",
        text: words(article, element),
      })),
    }));
    found<HTMLElement>(".filters").hidden = false;
    found<HTMLElement>(".keys").hidden = false;
    found<HTMLElement>(".filters").addEventListener("input", () => this.filter());
    found<HTMLFormElement>(".filters").addEventListener("submit", (event) => event.preventDefault());
    root.addEventListener("toggle", (event) => this.explain(event.target as HTMLDetailsElement), { capture: true });
    root.addEventListener("click", (event) => {
      const pressed = (event.target as Element).closest<HTMLElement>(".open-map");
      if (pressed) this.openMap(pressed);
    });
    document.addEventListener("keydown", (event) => this.press(event));
    window.addEventListener("hashchange", () => this.reveal());
    for (const button of root.querySelectorAll<HTMLElement>(".open-map")) button.hidden = false;
    if (matchMedia("(max-width: 820px)").matches)
      for (const folder of root.querySelectorAll("nav details")) folder.removeAttribute("open");
    this.filter();
    this.reveal();
  }

  /** Hides what the check boxes and the search leave out, and says how much is left. */
  private filter(): void {
    const severities = new Set(this.boxes.filter((box) => box.checked).map((box) => box.value));
    const terms = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let [shown, all] = [0, 0];
    for (const file of this.files) {
      let inFile = 0;
      for (const row of file.rows) {
        const visible = isShown(row, severities, terms);
        row.element.hidden = !visible;
        inFile += visible ? 1 : 0;
      }
      file.element.hidden = inFile === 0;
      if (file.entry) file.entry.hidden = inFile === 0;
      shown += inFile;
      all += file.rows.length;
    }
    for (const folder of [...this.root.querySelectorAll<HTMLElement>("nav li.folder")].reverse())
      folder.hidden = !folder.querySelector("li:not([hidden]) > a");
    const number = (count: number) => count.toLocaleString("en-GB");
    this.status.textContent =
      shown === all
        ? `${number(all)} ${all === 1 ? "finding" : "findings"}`
        : `${number(shown)} of ${number(all)} findings`;
  }

  /** Copies the explanation of a rule into a finding when it is opened; it stands once in the page. */
  private explain(details: HTMLDetailsElement): void {
    const code = details.dataset?.rule;
    if (!code || !details.open || details.dataset.filled) return;
    const rule = document.getElementById(code)?.querySelector(".rule-text");
    if (!rule) return;
    details.dataset.filled = "1";
    details.querySelector("p")?.replaceWith(rule.cloneNode(true));
  }

  /** Shows a finding that the address names, though a filter hides it. */
  private reveal(): void {
    const target = location.hash ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
    if (!target) return;
    const file = target.closest<HTMLElement>("section.file");
    target.hidden = false;
    if (file) file.hidden = false;
    target.scrollIntoView();
  }

  private openMap(button: HTMLElement): void {
    const article = button.closest("article");
    const data = document.getElementById("regard-atlas");
    if (!article || !data) return;
    const frame = make("iframe", {
      set: {
        title: `explorer: ${button.dataset.title}`,
        sandbox: "allow-scripts allow-downloads allow-forms",
        srcdoc: atlasPage(JSON.parse(data.textContent ?? '""') as string, button.dataset.state ?? ""),
      },
    });
    article.querySelector("iframe")?.remove();
    article.querySelector(".maps")?.after(frame);
    frame.focus();
  }

  private press(event: KeyboardEvent): void {
    const typing = /^(input|textarea|select)$/i.test((event.target as Element).tagName ?? "");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && event.target === this.search) {
      this.search.value = "";
      this.search.blur();
      this.filter();
    } else if (typing && (event.target as HTMLInputElement).type !== "checkbox") return;
    else if (event.key === "/") {
      event.preventDefault();
      this.search.focus();
    } else if (event.key === "j" || event.key === "k") this.step(event.key === "j" ? 1 : -1);
  }

  /** Goes to the next finding that is shown, or the one before. */
  private step(by: 1 | -1): void {
    const shown = this.files.flatMap((file) => file.rows).filter((row) => !row.element.hidden);
    if (!shown.length) return;
    const now = shown.findIndex((row) => row.element.classList.contains("current"));
    const next = shown[Math.min(Math.max(now + by, 0), shown.length - 1)].element;
    this.root.querySelector(".finding.current")?.classList.remove("current");
    next.classList.add("current");
    next.focus();
    next.scrollIntoView();
  }
}

const root = document.querySelector<HTMLElement>(".regard-findings");
if (root) {
  const scheme = browserScheme();
  const paint = () => {
    root.dataset.theme = scheme.dark() ? "dark" : "light";
  };
  paint();
  scheme.watch(paint);
  new FindingsPage(root);
}
