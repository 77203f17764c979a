import assert from "node:assert/strict";
import { test } from "node:test";
import { atlasPage, isShown } from "../src/finding_filter.ts";

const all = new Set(["error", "warning", "hint"]);

test("a finding needs one of the severities and all terms", () => {
  const row = { severity: "error", text: "src/model.py att111 softmax over axis -2" };
  assert.ok(isShown(row, all, []));
  assert.ok(isShown(row, new Set(["error"]), ["att1", "model.py"]));
  assert.equal(isShown(row, new Set(["warning", "hint"]), []), false);
  assert.equal(isShown(row, all, ["att111", "train.py"]), false);
});

test("a state is added to the data of the explorer's page, and cannot end it", () => {
  const page = '<script type="application/json" id="regard-data">{"meta":{}}</script>';
  const opened = atlasPage(page, "view=head&find=</script>$&");
  assert.equal(
    opened,
    '<script type="application/json" id="regard-data">{"state":"view=head&find=\\u003c/script>$&","meta":{}}</script>',
  );
  const data = JSON.parse(/\{.*\}/s.exec(opened)?.[0] ?? "") as { state: string };
  assert.equal(data.state, "view=head&find=</script>$&");
});
