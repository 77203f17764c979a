import assert from "node:assert/strict";
import { test } from "node:test";
import { addressFaults, faultWords } from "../src/address_faults.ts";
import { checkedMeta, type Meta } from "../src/types.ts";
import permalinks from "./permalinks.json";
import { short } from "./synthetic.ts";

const { meta } = short(2, 4, 32);
const faults = (hash: string) => addressFaults(hash, meta, 2);

test("what an address names in vain is found", () => {
  const wrong = ["view=zzz", "map=999", "head=x", "head=4", "hed=1", "at=40,2", "at=3", "pins=0.9", "scale=cubic", "clip=2", "frame=1,2,0", "find=%E0", "atlas=2", "against=5", "window=3", "threshold=a", "junk", "__proto__=1"];
  for (const pair of wrong) assert.deepEqual(faults(pair), [pair], pair);
  assert.deepEqual(faults("#view=head&map=9&head=1&order=-entropy&map2=1"), ["map=9", "map2=1"]);
});

test("what is here is not found fault with, also where it is as by default", () => {
  const right = ["", "#view=grid", "view=head&map=1&head=3&at=31,0", "at=4,&at=,", "scale=sqrt&clip=1&normalise=0&threshold=0.050&head=0&window=0,0&top=3", "against=&pins=&find=&text=a"];
  for (const hash of right) assert.deepEqual(faults(hash), [], hash);
  const wide: Meta = checkedMeta({ version: 1, title: "", maps: Array.from({ length: 4 }, () => ({ ...meta.maps[0], heads: 12, queries: 1000, keys: 1000 })) });
  for (const { permalink } of permalinks) assert.deepEqual(addressFaults(permalink, wide, 3), [], permalink);
});

test("what is wrong is said, and no more of it than is read", () => {
  assert.equal(faultWords([]), "");
  assert.equal(faultWords(["view=zzz"]), "The address has view=zzz: there is no such thing here, and the rest of it is shown.");
  const many = faultWords(Array.from({ length: 9 }, (_, at) => `a${at}=${"x".repeat(99)}`));
  assert.match(many, /…, and 3 more: there/);
  assert.ok(many.length < 400);
});
