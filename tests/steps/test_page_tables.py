import math

import torch

from regard.steps import WhatIf, walkthrough, worked_example
from regard.steps.page_tables import left_out, page_tables
from regard.steps.step_table import Walkthrough, make_table
from regard.steps.wording import Wording

QUERY, KEY, VALUE = torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 8.0]])


def by_key(tables):
    return {table["key"]: table for table in tables}


def test_numbers_are_texts_and_vectors_are_cut():
    tables = by_key(page_tables(walkthrough(torch.ones(1, 20), torch.ones(2, 20), torch.ones(2, 3))))
    assert tables["query"]["columns"] == ["1", "2", "3", "4", "5", "6", 14]
    assert tables["query"]["rows"][0]["cells"] == [*["1"] * 6, None]
    assert tables["weights"]["rows"] == [{"name": "q1", "cells": ["0.500", "0.500"]}]
    assert tables["weights"]["totals"] == ["1"]
    assert tables["weighted_values.1"]["totals"] == ["1", "1", "1"]
    assert tables["query"]["given"]
    assert not tables["weights"]["given"]


def test_each_part_of_a_concatenation_is_shown():
    numbers = torch.arange(10.0)
    [table] = page_tables(Walkthrough(Wording("a"), (make_table("concatenated", numbers, ["r"], parts=(4, 6)),)))
    assert table["columns"] == ["1", "2", "3", 1, "5", "6", "7", 3]
    assert table["rows"][0]["cells"] == ["0", "1", "2", None, "4", "5", "6", None]
    assert "… 1 more  5" in make_table("concatenated", numbers, ["r"], parts=(4, 6)).__str__()


def test_a_change_below_the_last_digit_is_not_marked():
    before = walkthrough(QUERY, KEY, VALUE)
    after = walkthrough(QUERY, KEY, VALUE, what_if=WhatIf(add={(0, 0): 1e-5}))
    tables = by_key(page_tables(after, before))
    assert tables["bias"]["rows"][0]["cells"] == [["0.000", "0"], "0"]
    assert all(isinstance(cell, str) for cell in tables["weights"]["rows"][0]["cells"])


def test_a_changed_number_has_the_number_before():
    before = walkthrough(QUERY, KEY, VALUE, scale=1.0)
    after = walkthrough(QUERY, KEY, VALUE, scale=1.0, what_if=WhatIf(flip=[(0, 0)]))
    tables = by_key(page_tables(after, before))
    share = f"{math.exp(2) / (math.exp(2) + 1):.3f}"
    assert tables["mask"]["rows"][0]["cells"] == [["0", "1"], "1"]
    assert tables["masked_scores"]["rows"][0]["cells"] == [["-∞", "2"], "0"]
    assert tables["weights"]["rows"][0]["cells"][0] == ["0", share]
    assert tables["exponentials"]["totals"] == [["1", f"{math.exp(2) + 1:.3f}"]]
    assert tables["query"]["rows"][0]["cells"] == ["2", "0"]


def test_without_any_key_the_table_says_so():
    before = walkthrough(QUERY, KEY, VALUE)
    after = walkthrough(QUERY, KEY, VALUE, what_if=WhatIf(flip=[(0, 0), (0, 1)]))
    weights = by_key(page_tables(after, before))["weights"]
    assert weights["note"]["en"] == "No key is left: every weight is 0, and so is the context."
    assert [cell[0] for cell in weights["rows"][0]["cells"]] == ["0", "0"]
    assert "example" not in weights


def test_exponentials_less_the_largest_score_are_not_compared_with_others():
    before = walkthrough(QUERY, KEY, VALUE)
    after = walkthrough(QUERY, KEY, VALUE, what_if=WhatIf(add={(0, 0): 30.0}))
    exponentials = by_key(page_tables(after, before))["exponentials"]
    assert exponentials["rows"][0]["cells"] == ["1", "0.000"]
    assert "largest score of the row was subtracted" in exponentials["note"]["en"]


def test_steps_that_are_no_more_are_named():
    before, after = walkthrough(QUERY, KEY, VALUE), walkthrough(QUERY, KEY, VALUE, what_if=WhatIf(scale=1.0))
    assert [title["en"] for title in left_out(after, before)] == ["Scores times the scale 0.707"]


def test_tables_of_heads_are_known_by_their_step():
    tables = by_key(page_tables(worked_example("multi-head")))
    assert tables["head2.query"]["given"]
    assert not tables["head2.weights"]["given"]
    assert tables["head2.weights"]["title"]["ko"].startswith("헤드 2: ")
