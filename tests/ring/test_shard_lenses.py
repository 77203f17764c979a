"""Lenses over sequences that are cut over processes: the results of one process."""

import numpy as np
import pytest
import torch
from lens_cases import all_lenses, parts
from ring_cases import MASKS, RingCase, random_case

import regard
import regard.ring as ring


def expected(case: RingCase, names: list[str], infinite: list[int] | None = None) -> dict[str, np.ndarray]:
    whole, options, _ = case.tensors(torch.float32)
    whole["key"][..., infinite or [], :] = float("nan")
    whole.pop("above")
    chosen = {name: lens for name, lens in all_lenses(case.length, case.seed).items() if name in names}
    torch.manual_seed(case.seed)
    with torch.no_grad():
        seen = regard.observe(*whole.values(), *chosen.values(), **options)
    found = {"output": seen.output, "lse": seen.lse}
    for name, lens in chosen.items():
        by_row, others = parts(name, seen[lens])
        found |= {part: tensor for part, (tensor, _) in by_row.items()} | others
    return {name: tensor.numpy() for name, tensor in found.items()}


def names_for(case: RingCase) -> list[str]:
    names = [*all_lenses(case.length, case.seed)]
    if not case.heads or case.batch == (2, 1):
        names.remove("roles")  # tokens are those of one batch axis
    return names


def assert_same(found: list[dict[str, np.ndarray]], truth: dict[str, np.ndarray]) -> None:
    for answer in found:
        assert not isinstance(answer, str), answer
        assert answer.keys() == truth.keys()
        for name, needs in truth.items():
            if name.endswith("columns") and name.split()[0] in ("top", "many"):
                continue  # of equal weights any may come first
            if name in ("edges", "rows", "queries"):
                np.testing.assert_array_equal(answer[name], needs, err_msg=name)
            else:
                np.testing.assert_allclose(answer[name], needs, rtol=2e-5, atol=3e-6, err_msg=name)
    for name in truth:
        for answer in found[1:]:
            np.testing.assert_array_equal(answer[name], found[0][name], err_msg=f"{name} of all ranks")


@pytest.mark.parametrize("number", range(12))
def test_all_lenses_of_random_problems(pool, number):
    processes = 1 + number % 4
    case = random_case(100 + number, processes)
    names = names_for(case)
    assert_same(pool.run("observe", processes, case=case, names=names), expected(case, names))


@pytest.mark.parametrize("layout", [ring.Contiguous((20, 1, 99)), ring.Zigzag(), ring.Striped()])
@pytest.mark.parametrize("mask", MASKS)
def test_all_lenses_of_each_mask(pool, mask, layout):
    case = RingCase(7, 120, layout=layout, mask=mask, heads=4, batch=(2,))
    names = names_for(case)
    assert_same(pool.run("observe", 3, case=case, names=names), expected(case, names))
