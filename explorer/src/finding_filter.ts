/** Which findings a filter shows, and the explorer's page of a map; functions without a state. */

export interface Searched {
  severity: string;
  /** In lower case: code, message and path. */
  text: string;
}

/** Whether a finding has one of the severities and all of the terms, which are in lower case. */
export function isShown(row: Searched, severities: ReadonlySet<string>, terms: readonly string[]): boolean {
  return severities.has(row.severity) && terms.every((term) => row.text.includes(term));
}

/** What the search looks through: the heading of a finding, and its file. */
export function words(article: Element, file: Element): string {
  const parts = [...article.querySelectorAll(".about, h3, .evidence")].map((part) => part.textContent);
  return [file.querySelector("h2")?.textContent, ...parts].join(" ").toLowerCase();
}

/** The static page of an atlas, opened as a permalink says. */
export function atlasPage(page: string, state: string): string {
  const start = 'id="regard-data">{';
  const written = JSON.stringify(state).replace(/</g, "\\u003c");
  return page.replace(start, () => `${start}"state":${written},`);
}
