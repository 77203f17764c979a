/** Chromium for the tests of pages, and what axe says of a page. */

import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { type Browser, chromium, type Page } from "playwright-core";

const axe = join(process.cwd(), "node_modules/axe-core/axe.min.js");

/** Why no page can be checked by axe; false where it can. */
export const withoutAxe = existsSync(axe) ? false : "axe-core is not installed: run `npm ci`";

/** Chromium: what CHROMIUM names, or Debian's. */
export const launch = (...more: string[]): Promise<Browser> =>
  chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", ...more],
  });

interface Rules {
  run(context: Document, options: object): Promise<{ violations: { id: string; nodes: { html: string }[] }[] }>;
}

/** The rules that a page breaks, each with the element where it does; `tags`: of these rules alone. */
export async function axeFaults(page: Page, tags?: string[]): Promise<string[]> {
  await page.evaluate(readFileSync(axe, "utf8"));
  const { violations } = await page.evaluate(
    (runOnly) =>
      (window as unknown as { axe: Rules }).axe.run(document, {
        resultTypes: ["violations"],
        ...(runOnly ? { runOnly } : {}),
      }),
    tags,
  );
  return violations.map(({ id, nodes }) => `${id}: ${nodes[0].html}`);
}
