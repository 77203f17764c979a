/**
 * Runs the tests: `node test/run.mjs` all of them, `unit` those without a browser, `browser` those in Chromium, or of
 * these the files that are named behind it, as in `browser explorer shelf`; `measure` the budgets; `serve [port]` shows
 * the page over synthetic attention. Chromium is the one that CHROMIUM names, else /usr/bin/chromium.
 */
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdirSync, readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const output = join(here, `../node_modules/.tests/${process.pid}`); // two runs at once leave each other alone
const web = join(here, "../../src/regard/explorer/web");
const kind = process.argv[2] ?? "all";

mkdirSync(output, { recursive: true });
process.on("exit", () => rmSync(output, { recursive: true, force: true }));
const names = readdirSync(here).filter((name) => name.endsWith(".ts"));
await build({
  entryPoints: names.map((name) => join(here, name)),
  outdir: output,
  outExtension: { ".js": ".mjs" },
  bundle: true,
  splitting: true,
  platform: "node",
  format: "esm",
  target: "node20",
  packages: "external",
  logLevel: "warning",
});

if (kind === "serve") {
  const run = spawnSync(process.execPath, [join(output, "server.mjs"), "serve", web, process.argv[3] ?? "8000"], {
    stdio: "inherit",
  });
  process.exit(run.status ?? 1);
}
const ends = {
  unit: [".unit.ts"],
  browser: [".browser.ts"],
  measure: [".measure.ts"],
  all: [".unit.ts", ".browser.ts"],
}[kind];
const files = names
  .filter((name) => ends.some((end) => name.endsWith(end)))
  .filter((name) => process.argv.length < 4 || process.argv.slice(3).includes(name.split(".")[0]))
  .map((name) => join(output, name.replace(/\.ts$/, ".mjs")));
const run = spawnSync(process.execPath, ["--test", "--test-concurrency=1", ...files], {
  stdio: "inherit",
  env: { ...process.env, REGARD_WEB: web },
});
process.exit(run.status ?? 1);
