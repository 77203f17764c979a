/** Detects a dark colour scheme of the browser or the notebook. */

export interface Scheme {
  dark(): boolean;
  /** `changed` is called after each change, until what comes back is called. */
  watch(changed: () => void): () => void;
}

/** What the browser, or the system, prefers. */
export function browserScheme(): Scheme {
  const query = matchMedia("(prefers-color-scheme: dark)");
  return {
    dark: () => query.matches,
    watch(changed) {
      query.addEventListener("change", changed);
      return () => query.removeEventListener("change", changed);
    },
  };
}

/** That of the page which has this one in a frame, as it says in messages; before it says one, that of the browser. */
export function framedScheme(): Scheme {
  const browser = browserScheme();
  let told: boolean | undefined;
  return {
    dark: () => told ?? browser.dark(),
    watch(changed) {
      const unwatch = browser.watch(changed);
      const listen = ({ source, data }: MessageEvent) => {
        const theme = source === window.parent && (data as { regardTheme?: unknown } | null)?.regardTheme;
        if (theme !== "dark" && theme !== "light") return;
        told = theme === "dark";
        changed();
      };
      window.addEventListener("message", listen);
      return () => {
        unwatch();
        window.removeEventListener("message", listen);
      };
    },
  };
}

/** The theme of JupyterLab or VS Code, which their page's body tells; else that of the browser. */
export function notebookScheme(): Scheme {
  const browser = browserScheme();
  const { body } = document;
  return {
    dark() {
      const { jpThemeLight, vscodeThemeKind } = body.dataset;
      if (jpThemeLight) return jpThemeLight === "false";
      return vscodeThemeKind ? /dark|high-contrast$/.test(vscodeThemeKind) : browser.dark();
    },
    watch(changed) {
      const unwatch = browser.watch(changed);
      const observer = new MutationObserver(changed);
      observer.observe(body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
      return () => {
        unwatch();
        observer.disconnect();
      };
    },
  };
}
