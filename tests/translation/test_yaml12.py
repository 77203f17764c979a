from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from regard.translation import yaml12

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9)


@given(nested)
@example("\x85")
@example("two\nlines \u2028 and more\n")
def test_every_plain_value_survives_yaml(value: Any):
    assert yaml12.parse(yaml12.dump(value)) == value


@given(
    st.sampled_from(["no", "yes", "off", "1e-3", "010", "12:30", "2020-03-14", "0x10", "~", "null", "1_000", "<<", "="])
)
def test_words_with_a_meaning_in_some_yaml_are_quoted_so_that_all_read_text(word: str):
    assert yaml12.parse(yaml12.dump({"key": word})) == {"key": word}
    assert yaml.safe_load(yaml12.dump({"key": word})) == {"key": word}


def test_plain_words_mean_what_they_look_like():
    text = "[no, on, y, true, ~, 1e-3, 1.5, -2, 010, 1:30, 2020-03-14, .inf, x]"
    expected = ["no", "on", "y", True, None, 1e-3, 1.5, -2, 10, "1:30", "2020-03-14", float("inf"), "x"]
    assert yaml12.parse(text) == expected


def test_merge_keys_of_yaml_still_work():
    assert yaml12.parse("base: &b {a: 1, c: 2}\nuse: {<<: *b, a: 3}")["use"] == {"a": 3, "c": 2}


def test_aliases_within_reason_still_work():
    text = "\n".join(["a: &a [1, 2]", "b: [*a, *a]", "c: &c {d: *a}", "e: {<<: *c, f: 1}"])
    assert yaml12.parse(text) == {"a": [1, 2], "b": [[1, 2]] * 2, "c": {"d": [1, 2]}, "e": {"d": [1, 2], "f": 1}}
