"""Values taken apart into tensors and a form, and put together again."""

import math
import subprocess
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

import regard
from regard import biases, masks, scores
from regard.utils.pytree import tree_flatten, tree_unflatten

TABLE = torch.randn(2, 8)


def same(one: Any, other: Any) -> bool:
    """Whether two values are alike in every part; tensors are the same objects."""
    if isinstance(one, torch.Tensor):
        return one is other
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one) if field.init
        )
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one is other)


def window_of_four(b, h, q, k):
    return (q - k).abs() <= 4


MASKS = [
    masks.causal(),
    masks.window(before=3, after=None),
    masks.window(),
    masks.padding(lengths=[3, 7]),
    masks.prefix(4),
    masks.prefix([1, 2]),
    masks.documents([0, 0, 1]),
    masks.strided(3),
    masks.fixed(4, 1),
    masks.dilated(2, 3, after=1),
    masks.global_tokens([0, 5]),
    masks.global_tokens([]),
    masks.global_tokens([3]),
    masks.random_blocks(16, 4, 2, seed=3),
    masks.random_blocks(16, 4, 2, heads=2),
    masks.where(keep=torch.rand(3, 5) < 0.5),
    masks.from_mod(window_of_four),
    masks.from_mod(lambda b, h, q, k: k <= q + h, heads=2),
    ~(masks.causal() & (masks.window(2) | masks.padding(lengths=[1, 2]))),
]
BIASES = [
    biases.tensor(torch.randn(3, 5)),
    biases.alibi(4),
    biases.relative(TABLE, max_distance=9, bidirectional=False),
    biases.clipped(TABLE, before=3, after=4),
    biases.gaussian(1.5, torch.ones(3)),
    biases.from_mod(lambda score, b, h, q, k: score + TABLE[h, k % 3], heads=2),
    biases.alibi(2) + biases.relative(TABLE, max_distance=9),
]


@pytest.mark.parametrize("value", [*MASKS, *BIASES], ids=repr)
def test_round_trip(value):
    tensors, form = tree_flatten(value)
    again = tree_unflatten(form, tensors)
    assert same(value, again)
    assert repr(again) == repr(value)
    assert tree_flatten(again)[1] == form


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_mask_put_together_keeps_the_same_pairs(mask):
    tensors, form = tree_flatten(mask)
    again = tree_unflatten(form, tensors)
    queries, keys = (3, 5) if "where" in repr(mask) else (2, 3)
    assert again.dense(queries, keys).equal(mask.dense(queries, keys))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -3, 2**70, 0.1, -0.0, 1e-320, math.pi, math.inf, -math.inf, "", "a 'word' \"so\"\n_0"),
        *((), (1,), (1, 2), ((), (None,)), ("_0", "1e999"), (1.0, (2.0, (3.0,)))),
    ],
)
def test_plain_values(value):
    tensors, form = tree_flatten(value)
    assert tensors == []
    again = tree_unflatten(form, [])
    assert again == value
    assert repr(again) == repr(value)


def test_nan():
    assert math.isnan(tree_unflatten(tree_flatten(math.nan)[1], []))


def test_other_tensors_in_their_place():
    one, other = torch.zeros(2), torch.ones(3)
    tensors, form = tree_flatten((one, (None, other), one))
    assert all(a is b for a, b in zip(tensors, (one, other, one), strict=True))
    assert tree_unflatten(form, [other, one, other])[1][1] is one
    bias = biases.relative(TABLE, max_distance=9)
    again = tree_unflatten(tree_flatten(bias)[1], [TABLE * 2])
    assert same(tree_flatten(again)[0][0], again.parameters()[0])
    assert again.parameters()[0].equal(TABLE * 2)


@pytest.mark.parametrize("options", [{"mask": mask} for mask in MASKS[:3]] + [{"bias": biases.alibi(2)}], ids=repr)
def test_problems(options):
    query = torch.randn(1, 2, 3, 4)
    mores: list[dict[str, Any]] = [
        {},
        {"softcap": 1.0, "sinks": torch.zeros(2), "dropout_p": 0.5},
        {"score": scores.Additive(4, 4, 5)},
    ]
    for more in mores:
        problem = regard.explain(query, query, query, **options, **more).problem
        tensors, form = tree_flatten(problem)
        assert same(problem, tree_unflatten(form, tensors))


def test_the_form_is_the_same_in_every_process(warm_python):
    code = (
        "import torch, regard; from regard.utils.pytree import tree_flatten;"
        "q = torch.zeros(1, 2, 3, 4); mask = regard.masks.causal() & regard.masks.window(before=2);"
        "form = tree_flatten(regard.explain(q, q, q, mask=mask, bias=regard.biases.alibi(2)).problem)[1];"
    )
    here: dict[str, Any] = {}
    exec(code, here)
    command = [*warm_python, "-c", code + "print(form)"]
    there = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert there.rstrip("\n") == str(here["form"])


def test_a_function_is_the_same_object_again():
    mask = masks.from_mod(window_of_four)
    _, form = tree_flatten(mask)
    assert tree_unflatten(form, []).mask_mod is window_of_four
    assert tree_flatten(masks.from_mod(window_of_four))[1] == form


def test_functions_that_are_gone_are_not_taken_for_others():
    forms = {tree_flatten(masks.from_mod(lambda b, h, q, k, reach=reach: q - k < reach))[1] for reach in range(20)}
    assert len(forms) == 20
