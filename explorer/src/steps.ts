/** Entry point of the live page of `regard steps`. */

import { type EmbeddedData, EmbeddedSteps, ServedSteps, type StepSource } from "./steps/answers.ts";
import { StepsPage } from "./steps/steps_page.ts";

async function open(root: HTMLElement): Promise<void> {
  const data = document.getElementById("regard-data");
  const stored = data && (JSON.parse(data.textContent ?? "") as EmbeddedData);
  const source: StepSource = stored
    ? await EmbeddedSteps.read(stored)
    : new ServedSteps(new URL("./", location.href).href);
  const options = await source.options();
  new StepsPage(root, source, options, location.hash || (stored?.opening ?? ""));
}

const root = document.getElementById("regard-steps");
if (root)
  open(root).catch((error: unknown) => {
    root.textContent = error instanceof Error ? error.message : String(error);
  });
