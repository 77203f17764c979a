import assert from "node:assert/strict";
import { test } from "node:test";
import { parseGoTo } from "../src/goto.ts";
import { keyChange } from "../src/keyboard.ts";
import { Loader } from "../src/loader.ts";
import { Bounded } from "../src/rendering/painter.ts";
import { floats } from "../src/sources/arrays.ts";
import { shownOf } from "../src/sources/listed.ts";
import { EmbeddedSource } from "../src/sources/embedded.ts";
import { type Answer, Messages, MessageSource, told } from "../src/sources/messages.ts";
import { decode, DEFAULT, encode, isStep, pinned, type Pin, type State, within } from "../src/state.ts";
import { type Kept, NOTHING, pair } from "../src/kept.ts";
import permalinks from "./permalinks.json";
import { short, weightsOf } from "./synthetic.ts";

type Sides = (number | number[] | null)[];

/** As Python has it: a number, none, or several of each side. */
const kept = (sides: Sides): Kept => {
  const [query, key] = sides.map((side) => (side === null ? [] : [side].flat()));
  return { query, key };
};

test("a state survives its permalink, which is the one that Python writes", () => {
  const told = permalinks.map(({ permalink, state }) => {
    const { frame, at, ...rest } = state as Omit<Partial<State>, "frame" | "at"> & { frame?: number[]; at?: Sides };
    const expected: State = { ...DEFAULT, ...rest, at: at ? kept(at) : NOTHING };
    if (frame) expected.frame = { row: frame[0], column: frame[1], span: frame[2] };
    assert.deepEqual(decode(`#${permalink}`), expected);
    assert.equal(encode(expected), permalink);
    return Object.keys(state).sort();
  });
  assert.deepEqual(told.at(-1), Object.keys(DEFAULT).sort());
});

test("broken permalinks are read as far as they go", () => {
  assert.deepEqual(
    decode("#view=none&map=-1&head=x&at=1&frame=1,2,0&pins=1,a.b&scale=%E0%A4%A&theme=__proto__&junk"),
    DEFAULT,
  );
  assert.equal(decode("#head=4&constructor=1").head, 4);
});

test("a page shows its own text of a store, and behind it what it showed before", () => {
  const atlases = ["d", "c", "b", "a"].map((name, at) => ({ number: 3 - at, name }));
  const names = (text: string, before?: number) =>
    shownOf({ atlases, rerun: 9 }, text, before === undefined ? undefined : { number: before, name: "" }).map(({ name }) => name).join("");
  assert.equal(names(""), "dc");
  assert.equal(names("b"), "bd");
  assert.equal(names("d", 0), "da");
  assert.equal(names("d", 9), "d", "one that is not kept any more");
  assert.equal(names("d", 3), "d", "the same text again");
  assert.equal(shownOf({ atlases, rerun: 0 }, "b").length, 4);
});

test("a state is held within what there is", () => {
  const { meta } = short(2, 4, 32);
  const state = within(
    {
      ...DEFAULT,
      map: 9,
      head: 9,
      at: pair(40, 2),
      pins: [
        [0, 3],
        [0, 4],
        [2, 0],
      ],
    },
    meta,
  );
  assert.deepEqual([state.map, state.head, state.at, state.pins], [1, 3, { query: [], key: [2] }, [[0, 3]]]);
});

test("pins come and go", () => {
  let pins: Pin[] = [];
  for (let head = 0; head < 7; head += 1) pins = pinned(pins, [0, head]);
  const heads = (all: Pin[]) => all.map(([, head]) => head);
  assert.deepEqual(heads(pins), [1, 2, 3, 4, 5, 6]);
  assert.deepEqual(heads(pinned(pins, [0, 2])), [1, 3, 4, 5, 6]);
});

test("keys", () => {
  const { meta } = short(2, 4, 32);
  const state: State = { ...DEFAULT, view: "head", map: 0, head: 3 };
  assert.deepEqual(keyChange("ArrowRight", state, meta), { head: 0, mean: "" });
  assert.deepEqual(keyChange("ArrowDown", state, meta), { map: 1, head: 3 });
  assert.deepEqual(keyChange("Escape", state, meta), { view: "grid" });
  assert.equal(keyChange("toString", state, meta), undefined);
  assert.equal(keyChange("ArrowRight", DEFAULT, meta), undefined);
  assert.ok(isStep(state, { ...state, head: 1 }) && !isStep(state, { ...state, scale: "log" }));
});

test("where to go", () => {
  assert.deepEqual(parseGoTo("12, 7"), { cell: [12, 7] });
  assert.deepEqual(parseGoTo(" 12 "), { index: 12 });
  assert.deepEqual(parseGoTo("the 1"), { find: "the 1" });
  assert.equal(parseGoTo(""), undefined);
});

const turn = () => new Promise((resolve) => setTimeout(resolve, 0));

test("what is no longer in sight is dropped, what two want is not", async () => {
  const loader = new Loader(1e6, 2);
  const aborted: string[] = [];
  const load = (key: string) => (signal: AbortSignal) =>
    new Promise<Float32Array>((resolve) => {
      signal.addEventListener("abort", () => aborted.push(key));
      setTimeout(() => resolve(new Float32Array(4)), 20);
    });
  const [one, two] = [{}, {}];
  const ask = (owner: object, keys: string[]) =>
    loader.frame(owner, (need) => keys.forEach((key) => need(key, load(key))));
  ask(one, ["a", "b", "c"]);
  ask(two, ["b"]);
  ask(one, ["d"]);
  assert.deepEqual(aborted, ["a"]);
  assert.equal(loader.counts.dropped, 2);
  await new Promise((resolve) => setTimeout(resolve, 60));
  assert.equal(loader.peek("a"), undefined);
  assert.equal(loader.peek("c"), undefined);
  assert.ok(loader.peek("b") && loader.peek("d"));
});

test("the cache has an upper bound, and keeps what was used last", async () => {
  const loader = new Loader(1000, 9);
  const owner = {};
  const ask = (key: string) => loader.frame(owner, (need) => need(key, async () => new Float32Array(50)));
  for (const key of ["a", "b", "c"]) {
    ask(key);
    await turn();
  }
  loader.peek("a");
  ask("d");
  await turn();
  assert.deepEqual(
    ["a", "b", "c", "d"].map((key) => loader.peek(key) !== undefined),
    [true, false, true, true],
  );
  assert.ok(loader.held <= 1000);
});

test("a failure is told and not asked again at once", async () => {
  const loader = new Loader();
  let asked = 0;
  const ask = () =>
    loader.frame(loader, (need) =>
      need("x", async () => {
        asked += 1;
        throw new Error("head 7 is not there");
      }),
    );
  ask();
  await turn();
  ask();
  await turn();
  assert.equal(asked, 1);
  assert.equal(loader.error, "head 7 is not there");
});

test("bounded things are thrown away", () => {
  const gone: string[] = [];
  const bounded = new Bounded<string>(10, (value) => gone.push(value));
  for (const name of ["a", "b", "a", "c"]) bounded.get(name, 4, () => name);
  assert.deepEqual(gone, ["b"]);
});

const base64 = (array: Float32Array | Uint8Array | Uint16Array) =>
  Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64");

test("written arrays of every type", async () => {
  assert.deepEqual([...(await floats({ type: "f4", data: base64(Float32Array.of(0.5, NaN)) }))], [0.5, NaN]);
  const halves = Uint16Array.of(0x3800, 0x7e00, 0xc000, 0x0001, 0x7c00);
  assert.deepEqual([...(await floats({ type: "f2", data: base64(halves) }))], [0.5, NaN, -2, 2 ** -24, Infinity]);
  assert.deepEqual(
    [...(await floats({ type: "u1", data: base64(Uint8Array.of(0, 2, 255)), scale: 0.25 }))],
    [0, 0.5, NaN],
  );
  const { gzipSync } = await import("node:zlib");
  const packed = gzipSync(Buffer.from(Float32Array.of(1, 2).buffer)).toString("base64");
  assert.deepEqual([...(await floats({ type: "f4", data: packed, gzip: true }))], [1, 2]);
});

test("an embedded source puts regions together from tiles", async () => {
  const { meta, maps } = short(1, 1, 300);
  const tiles: Record<string, { type: "f4"; data: string }> = {};
  for (const [row, column] of [
    [0, 0],
    [0, 1],
    [1, 0],
    [1, 1],
  ]) {
    const region = {
      row0: 256 * row,
      row1: Math.min(256 * row + 256, 300),
      column0: 256 * column,
      column1: Math.min(256 * column + 256, 300),
    };
    tiles[`0/0/${row}/${column}`] = { type: "f4", data: base64(weightsOf(maps[0], 0, region)) };
  }
  const source = new EmbeddedSource({ meta, tokens: [{ query: ["a", "b"] }], pooled: {}, tiles, profiles: {} });
  const region = { row0: 250, row1: 262, column0: 240, column1: 259 };
  assert.deepEqual(await source.weights(0, 0, region), weightsOf(maps[0], 0, region));
  assert.deepEqual(await source.tokens(0, "key", 1, 9), ["b"]);
  assert.ok(source.offers(0, 0, -1) && !source.offers(0, 0, 0));
  await assert.rejects(source.pooled(0, 0, 0, "max"), /not written into the page/);
});

test("messages find their answers", async () => {
  let answer: (message: Answer, buffers: ArrayBufferView[]) => void = () => undefined;
  const sent: { id: string; method: string; arguments: Record<string, unknown> }[] = [];
  const messages = new Messages({
    send: (message) => sent.push(message),
    listen: (listener) => (answer = listener),
  });
  const source = new MessageSource(messages, 7);
  const first = source.profile(0, 1, "entropy");
  const second = source.tokens(0, "key", 0, 2);
  const third = source.pooled(9, 0, 0, "max");
  answer({ id: sent[1].id, result: ["a", "b"] }, []);
  const bytes = new Uint8Array([9, ...new Uint8Array(Float32Array.of(1, 2).buffer)]);
  answer({ id: sent[0].id }, [new DataView(bytes.buffer, 1)]);
  answer({ id: sent[2].id, error: "there is no map 9" }, []);
  assert.deepEqual([...(await first)], [1, 2]);
  assert.deepEqual(await second, ["a", "b"]);
  await assert.rejects(third, /no map 9/);
  assert.deepEqual(sent[2].arguments, { atlas: 7, map: 9, head: 0, level: 0, reduce: "max" });
});

test("a run that is asked for in messages gives what there is then", async () => {
  let answer: (message: Answer, buffers: ArrayBufferView[]) => void = () => undefined;
  const sent: { id: string; method: string; arguments: Record<string, unknown> }[] = [];
  const messages = new Messages({
    send: (message) => sent.push(message),
    listen: (listener) => (answer = listener),
  });
  const asked = told(messages);
  answer({ id: sent[0].id, result: { atlases: [{ number: 0, name: "one" }], rerun: 9 } }, []);
  const collection = await asked;
  assert.equal(collection.cancels, undefined);
  const { signal } = new AbortController();
  const long = collection.rerun?.("more than nine", signal) ?? Promise.resolve();
  await assert.rejects(long, /has 14 bytes; at most 9 are read/);
  const run = collection.rerun?.("two", signal);
  assert.deepEqual([sent[1].method, sent[1].arguments], ["rerun", { text: "two" }]);
  assert.notEqual(sent[1].id, sent[0].id);
  const atlases = [
    { number: 1, name: "two" },
    { number: 0, name: "one" },
  ];
  answer({ id: sent[1].id, result: { atlases, rerun: 9 } }, []);
  const then = await run;
  assert.deepEqual(
    then?.atlases.map(({ name }) => name),
    ["two", "one"],
  );
  void then?.atlases[0].source.tokens(0, "key", 0, 1);
  assert.equal(sent[2].arguments.atlas, 1);
});
