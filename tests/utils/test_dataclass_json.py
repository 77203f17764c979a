"""Dataclasses as JSON and back: what goes in comes out, and no file names a class outside the table."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.utils.dataclass_json import DataclassJSON


@dataclass(frozen=True)
class Leaf:
    numbers: tuple[float, ...] = ()
    name: str | None = None


@dataclass(frozen=True, eq=False)
class Branch:
    left: Any
    right: Any = field(default_factory=Leaf)
    table: Tensor | None = None
    derived: int = field(init=False, default=3)

    def __post_init__(self):
        if self.left == 13:
            raise ValueError("left is 13")


FORM = DataclassJSON({"leaf": Leaf, "branch": Branch}, tag="is", subject="the tree", error=CheckpointError)


def test_values_and_tensors_come_back():
    stored: dict[str, Tensor] = {}

    def store(tensor):
        stored["a"] = tensor
        return "a"

    value = Branch(Leaf((1.5, 2.0), "é"), Branch(True), torch.arange(3))
    tree = json.loads(json.dumps(FORM.encode(value, store)))
    assert "derived" not in tree
    again = FORM.decode(tree, stored)
    assert again.left == value.left
    assert again.right.left is True
    assert again.right.right == Leaf()
    assert again.table is value.table


def test_what_prepare_returns_is_encoded():
    tree = FORM.encode(Branch(Leaf()), prepare=lambda value: Leaf((1,)) if isinstance(value, Leaf) else value)
    assert tree["left"] == tree["right"] == {"is": "leaf", "numbers": [1], "name": None}


class Subclass(Leaf):
    pass


@pytest.mark.parametrize("value", [Subclass(), Branch(Subclass()), Branch(1, table=torch.ones(2))], ids=repr)
def test_what_has_no_form_is_refused(value):
    with pytest.raises(CheckpointError, match="the tree holds a Subclass, which is none|the tree holds a tensor"):
        FORM.encode(value)


DEEP: Any = 0
for _ in range(500):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"is": "laef"}, "the tree names 'laef', which is unknown here; did you mean 'leaf'"),
        ({"numbers": []}, "the tree names 'None'"),
        ({"is": ["leaf"]}, r"the tree names \"\['leaf'\]\""),
        ({"is": "leaf", "numbrs": []}, r"'leaf' in the tree has \['is', 'numbrs'\]; it needs 'is' and \['numbers'"),
        ({"is": "leaf", "is_": 1, "name": 2}, "'leaf' in the tree has"),
        ({"is": "branch"}, r"'branch' in the tree has \['is'\]; it needs 'is' and \['left'"),
        ({"is": "branch", "left": 0, "derived": 4}, "'branch' in the tree has"),
        ({"is": "branch", "left": 13}, "'branch' in the tree cannot be built: left is 13"),
        ({"is": "branch", "left": {"array": "b"}}, "refers to the array 'b', which is not there"),
        ({"is": "branch", "left": 10**30}, "has a whole number of more than"),
        (DEEP, "the tree is nested deeper than 64 times"),
    ],
)
def test_other_trees_are_refused(tree, message):
    with pytest.raises(CheckpointError, match=message):
        FORM.decode(tree, {"a": torch.ones(1)})
