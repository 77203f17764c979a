/**
 * Builds the page that the Python package ships: `node build.mjs`; with `--check` only says whether the page in the
 * package is that of these sources.
 *
 * The digest in the first line of explorer.js is the SHA-256 of every file below src/, in the order of their paths:
 * path, a zero byte, content, a zero byte.
 */
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const here = fileURLToPath(new URL(".", import.meta.url));
const sources = join(here, "src");
const target = join(here, "../src/regard/explorer/web");

function filesBelow(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? filesBelow(join(folder, entry.name)) : [join(folder, entry.name)],
  );
}

function digest() {
  const hash = createHash("sha256");
  const named = filesBelow(sources).map((file) => [relative(sources, file).split(sep).join("/"), file]);
  for (const [name, file] of named.sort(([a], [b]) => (a < b ? -1 : 1))) {
    hash.update(name).update("\0").update(readFileSync(file)).update("\0");
  }
  return hash.digest("hex");
}

const common = { bundle: true, minify: true, write: false, logLevel: "warning", charset: "ascii" };

async function built() {
  const sum = digest();
  const banner = `/* regard explorer, Apache-2.0. Built by explorer/build.mjs from sources with SHA-256 ${sum} */`;
  const script = await build({
    ...common,
    entryPoints: [join(sources, "main.ts")],
    format: "esm",
    target: ["es2022"],
    banner: { js: banner },
  });
  const module = (name) =>
    build({ ...common, entryPoints: [join(sources, name)], format: "esm", target: ["es2022"] });
  const [findings, steps] = await Promise.all([module("findings.ts"), module("steps.ts")]);
  const style = (name) => build({ ...common, entryPoints: [join(sources, name)] });
  const [explorerStyle, findingsStyle, stepsStyle] = await Promise.all(
    ["explorer.css", "findings.css", "steps.css"].map(style),
  );
  return {
    "explorer.js": script.outputFiles[0].text,
    "explorer.css": explorerStyle.outputFiles[0].text,
    "index.html": readFileSync(join(sources, "index.html"), "utf8"),
    "findings.js": findings.outputFiles[0].text,
    "findings.css": findingsStyle.outputFiles[0].text,
    "steps.js": steps.outputFiles[0].text,
    "steps.css": stepsStyle.outputFiles[0].text,
    "steps.html": readFileSync(join(sources, "steps.html"), "utf8"),
  };
}

const files = await built();
if (process.argv.includes("--check")) {
  const stale = Object.entries(files).filter(([name, text]) => readFileSync(join(target, name), "utf8") !== text);
  for (const [name] of stale) console.error(`${name} is not that of the sources: run node build.mjs`);
  process.exitCode = stale.length ? 1 : 0;
} else {
  mkdirSync(target, { recursive: true });
  for (const [name, text] of Object.entries(files)) {
    writeFileSync(join(target, name), text);
    console.log(`${name}: ${text.length} bytes, ${gzipSync(text, { level: 9 }).length} with gzip`);
  }
}
