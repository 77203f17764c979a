from itertools import combinations, product

import pytest
import torch

from regard import masks
from regard.testing import Case, cases, long_cases, make_inputs, random_cases
from regard.testing.cases import (
    AXES,
    DTYPES,
    LAYOUTS,
    LENGTHS,
    LONG_AXES,
    MAX_ROWWISE_PAIRS,
    MAX_TRIPLES,
    LeadingAxes,
    consistent,
    covering_array,
)
from regard.testing.mask_and_bias_cases import MASK_CASES


def test_every_pair_of_values_meets():
    axes = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r"), "d": ("s", "t")}
    rows = covering_array(axes, 2)
    for one, other in combinations(axes, 2):
        assert {(row[one], row[other]) for row in rows} == {(i, j) for i in axes[one] for j in axes[other]}
    assert len(rows) < 15  # of 36


def test_what_is_impossible_is_left_out():
    axes = {"a": ("1", "2"), "b": ("x", "y"), "c": ("p", "q")}
    rows = covering_array(axes, 2, lambda row: not (row.get("a") == "2" and row.get("b") == "y"))
    assert {(row["a"], row["b"]) for row in rows} == {("1", "x"), ("1", "y"), ("2", "x")}
    assert {(row["a"], row["c"]) for row in rows} == {("1", "p"), ("1", "q"), ("2", "p"), ("2", "q")}


def test_of_axes_with_many_values_one_less_meet():
    axes = {"a": "123456", "b": "123456", "c": "12", "d": "12"}
    rows = covering_array(axes, 3, most=30)
    for names in combinations(axes, 3):
        met = {tuple(row[name] for name in names) for row in rows}
        if {"a", "b"} <= set(names):
            assert len(met) < 72
        else:
            assert len(met) == 24
    assert {(row["a"], row["b"]) for row in rows} == {(i, j) for i in axes["a"] for j in axes["b"]}
    assert len(covering_array(axes, 3, most=30)) < len(covering_array(axes, 3))


def test_triples_of_cases():
    for names in combinations(AXES, 3):
        sizes = [len(AXES[name]) for name in names]
        wanted = 1
        for size in sizes:
            wanted *= size
        if wanted > MAX_TRIPLES:
            continue
        met = {tuple(getattr(case, name) for name in names) for case in cases()}
        for values in product(*(AXES[name] for name in names)):
            assert values in met or not consistent(dict(zip(names, values, strict=True))), values


def test_long_cases_cross_the_borders_of_tiles():
    assert all(case.sizes[0] * case.sizes[1] > MAX_ROWWISE_PAIRS or case.lengths == "3x1031" for case in long_cases())
    for name, values in LONG_AXES.items():
        assert {getattr(case, name) for case in long_cases()} == set(values)


def test_sampled_cases():
    drawn = list(random_cases(400, 3))
    assert drawn == list(random_cases(400, 3))
    assert drawn[:50] == list(random_cases(50, 3))
    assert drawn != list(random_cases(400, 4))
    assert len({case.id for case in drawn}) == len(set(drawn)) > 390
    for name, values in AXES.items():
        assert name == "lengths" or {getattr(case, name) for case in drawn} == set(values)
    assert all(consistent({name: getattr(case, name) for name in AXES}) for case in drawn)
    queries, keys = zip(*(case.sizes for case in drawn), strict=True)
    assert min(queries) == min(keys) == 0
    assert max(queries) > 20 < max(keys)


@pytest.mark.parametrize(
    "choices",
    [
        {"score": "dot", "variant": "scale"},
        {"layout": "3d", "variant": "softcap&sinks"},
        {"layout": "2d", "mask": "head-mod"},
        {"mask": "documents", "lengths": "7x5", "positions": "tail"},
        {"lengths": "131x257", "poison": "key"},
        {"bias": "blocked", "poison": "value"},
    ],
)
def test_what_makes_no_sense_together(choices):
    assert not consistent(choices)
    for name in choices:
        assert consistent({other: value for other, value in choices.items() if other != name})


def test_every_value_of_every_axis_is_in_some_case():
    for name, values in AXES.items():
        assert {getattr(case, name) for case in cases(2)} == set(values)


def test_ids_differ_and_read():
    ids = [case.id for case in cases(3)]
    assert len(set(ids)) == len(ids) > 300
    assert Case().id == "default-4d-5x7-float32"
    case = Case(score="additive", mask="causal&padding", layout="grouped", dtype="bfloat16", poison="masked")
    assert case.id == "additive-causal&padding-grouped-5x7-bfloat16-masked"


def test_the_same_case_has_the_same_numbers_and_leaves_the_seed_alone():
    torch.manual_seed(3)
    one = make_inputs(Case(score="additive", bias="gaussian"))
    after = torch.rand(1)
    other = make_inputs(Case(score="additive", bias="gaussian"))
    assert all(one.leaves[name].equal(other.leaves[name]) for name in one.leaves)
    torch.manual_seed(3)
    assert after.equal(torch.rand(1))
    assert not make_inputs(Case(bias="pairs")).leaves["query"].equal(one.leaves["query"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("memory", AXES["memory"])
def test_the_shapes_are_those_of_the_layout(layout, memory):
    inputs = make_inputs(Case(layout=layout, memory=memory, score="general"))
    query, key, value = (inputs.argument(name, inputs.leaves[name]) for name in ("query", "key", "value"))
    of: LeadingAxes = LAYOUTS[layout]
    heads, key_heads = ((of.heads,), (of.key_heads,)) if of.heads else ((), ())
    batch = (1,) * len(of.batch) if memory == "broadcast" else of.batch
    assert query.shape == (*of.batch, *heads, 5, 11)
    assert key.shape == (*batch, *key_heads, 7, 13)
    assert value.shape == (*batch, *key_heads, 7, 17)
    assert query.is_contiguous() == (memory != "strided")
    assert inputs.problem().weights_shape == (*of.batch, *heads, 5, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_dtype_and_lengths(dtype, lengths):
    inputs = make_inputs(Case(dtype=dtype, lengths=lengths))
    problem = inputs.problem()
    assert (problem.queries, problem.keys) == LENGTHS[lengths]
    assert problem.value.dtype == DTYPES[dtype]


@pytest.mark.parametrize("memory", AXES["memory"])
@pytest.mark.parametrize(("mask", "lengths", "poisoned"), [("ignore", "5x7", "key"), ("causal", "7x5", "query")])
def test_poison_in_masked_places_only(memory, mask, lengths, poisoned):
    inputs = make_inputs(Case(mask=mask, lengths=lengths, memory=memory, poison="masked", layout="grouped"))
    assert not inputs.leaves[poisoned].isfinite().all()
    for name in ("query", "key", "value"):
        assert inputs.leaves[name].isfinite().equal(inputs.attended_entries(name))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_poison_in_one_place(name):
    inputs = make_inputs(Case(poison=name))
    assert {of: int((~inputs.leaves[of].isfinite()).sum()) for of in ("query", "key", "value")} == {
        "query": 0,
        "key": 0,
        "value": 0,
        name: 1,
    }


def test_each_mask_of_the_table_is_drawn():
    assert {case.mask for case in cases(2)} == {"all", *MASK_CASES}


def mask_classes(mask: masks.Mask | None) -> set[type]:
    """The classes of a mask and of all its operands."""
    return set() if mask is None else {type(mask)}.union(*(mask_classes(operand) for operand in mask.operands))


def subclasses(parent: type) -> set[type]:
    return set(parent.__subclasses__()).union(*(subclasses(child) for child in parent.__subclasses__()))


def test_every_mask_has_a_case():
    of_library = {each for each in subclasses(masks.Mask) if each.__module__.startswith("regard.masks.")}
    drawn = set().union(*(mask_classes(make_inputs(case).mask) for case in cases(2)))
    # A base class, a part of `GlobalTokens`, and what `from_block_mask` returns, which tests/masks/test_flex.py holds.
    assert {each.__name__ for each in of_library - drawn} == {"BinaryMask", "GlobalKeys", "BlockLayout"}
