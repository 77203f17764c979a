"""The maps of findings: influence of tokens on outputs, differences of two runs, and weights of heads."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from regard.doctor import examine, finding_map
from regard.doctor.finding_map import MOST_CHANGES, influence_map
from regard.doctor.map_figure import figure
from regard.doctor.subject import Subject


class Mixing(nn.Module):
    """y = M x, so that the influence of x_j on y_i is |M_ij| times its change."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x):
        return self.matrix @ x


class Heads(nn.Module):
    """Causal attention of two heads; the second also sees the next position, or has one weight of 1."""

    def __init__(self, *, leaks: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.project, self.leaks, self.factor = nn.Linear(8, 24), leaks, factor

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        keep = torch.ones(2, x.shape[1], x.shape[1], dtype=torch.bool).tril()
        keep[1] = keep[1].logical_or(torch.ones_like(keep[1]).tril(int(self.leaks)))
        scores = (q @ k.mT / 2 * torch.tensor([1.0, self.factor]).to(q)[:, None, None]).masked_fill(~keep, -torch.inf)
        return (functional.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


def maps_of(model, code, **options):
    x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    (found,) = [one for one in examine(model, x, maps=True, **options).findings if one.code == code]
    return found, {one.kind: one for one in found.maps}


@pytest.mark.parametrize("length", [6, MOST_CHANGES + 10])
def test_the_influence_of_a_linear_model_is_its_matrix(length):
    matrix = torch.randn(length, length, generator=torch.Generator().manual_seed(1)).tril()
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(2))
    subject = Subject(Mixing(matrix), x)
    assert influence_map(subject, 0.0, at=(0, 0)) == ()
    subject.maps = True
    (found,) = influence_map(subject, 1e-6, at=(2, 1))
    change = subject.others(x) - x
    stretch = 1 if length <= MOST_CHANGES else 2
    for start in range(0, length, stretch):
        part = slice(start, start + stretch)
        expected = torch.einsum("ij,bjf->bif", matrix[:, part], change[:, part]).abs().amax((0, 2))
        assert torch.allclose(found.values[0, :, start], expected, atol=1e-5)
        assert torch.equal(found.values[0, :, start], found.values[0, :, min(start + stretch, length) - 1])
    assert (found.kind, found.at, found.tolerance) == ("influence", (2, 1), 1e-6)
    assert found.title.endswith("2 neighbouring tokens at a time") is (stretch == 2)


def test_the_influence_of_a_long_sequence_has_cells(monkeypatch):
    matrix = torch.randn(50, 50, generator=torch.Generator().manual_seed(1)).tril()
    subject = Subject(Mixing(matrix), torch.randn(2, 50, 3))
    subject.maps = True
    (exact,) = influence_map(subject, 1e-6, at=(41, 9))
    monkeypatch.setattr(finding_map, "CELLS", 10)
    (found,) = influence_map(subject, 1e-6, at=(41, 9))
    assert (found.values.shape, found.cell, found.place) == ((1, 10, 10), (5, 5), (8, 1))
    together = exact.values[0].unflatten(0, (10, 5)).amax(1)
    assert bool((found.values[0] <= together.unflatten(1, (10, 5)).sum(-1) + 1e-5).all())
    assert bool((found.values[0].triu(1) == 0).all())
    assert ">45<" in figure(found, None)


def test_a_leak_has_its_influence_and_the_weights_of_its_head():
    found, maps = maps_of(Heads(leaks=True), "RUN101", causal=True, checks=["future"])
    influence, attention = maps["influence"], maps["attention"]
    assert influence.at == (found.evidence.moved, found.evidence.changed)
    assert attention.at is not None
    above = torch.triu(torch.ones(20, 20, dtype=torch.bool), 1)
    leaking = influence.values[0] > influence.tolerance
    assert torch.equal(leaking & above, torch.diag(torch.ones(19), 1).bool())
    assert influence.values[0][influence.at] == pytest.approx(found.evidence.by, rel=1e-5)
    assert attention.head == 1
    assert attention.at[1] == attention.at[0] + 1
    assert attention.values[1][attention.at] == attention.values[1][above].nan_to_num().max()
    assert bool(attention.values[0].isnan()[above].all())
    assert "head 1" in attention.title


def test_a_head_that_is_saturated_has_its_weights():
    found, maps = maps_of(Heads(factor=1e9), "RUN111", checks=["heads"])
    values = maps["attention"].values[maps["attention"].head]
    assert found.message.startswith("more than half of the rows of head 1 ")
    assert bool((values.nan_to_num().amax(-1) > 0.999).float().mean() > 0.5)


def test_differences_are_by_output():
    class Random(nn.Module):
        def forward(self, x):
            return torch.cat([x[:, :5], functional.dropout(x[:, 5:], 0.5)], 1)

    _, maps = maps_of(Random(), "RUN123", checks=["random"])
    moved = maps["difference"].values[0, 0]
    assert moved.shape == (20,)
    assert bool((moved[:5] == 0).all())
    assert bool((moved[5:] > 0).any())
    assert maps["difference"].at == (0, int(moved.argmax()))


def test_without_maps_there_are_none():
    found = examine(Heads(leaks=True), torch.randn(2, 20, 8), causal=True, checks=["future"]).findings
    assert found
    assert all(one.maps == () for one in found)
    assert "maps" not in found[0].as_dict()


def test_a_finding_whose_map_cannot_be_measured_stays():
    class Limited(Heads):
        runs = 0

        def forward(self, x):
            type(self).runs += 1
            if type(self).runs > 60:
                raise RuntimeError("no more")
            return super().forward(x)

    model = Limited(leaks=True)
    x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(3))
    without = examine(model, x, causal=True, checks=["future"])
    Limited.runs = 60 - Limited.runs  # as many as that took
    found = examine(model, x, causal=True, checks=["future"], maps=True)
    assert [one.code for one in found.findings] == [one.code for one in without.findings] == ["RUN101"]
    assert found.findings[0].maps == ()


def test_a_window_that_is_not_kept_has_the_weights_beyond_it():
    class Stated(Heads):
        window = 4

    found, maps = maps_of(Stated(), "RUN108", checks=["window"])
    at = maps["attention"].at
    assert at is not None
    assert abs(at[0] - at[1]) > 4
    assert found.message.startswith("a window of 4 is stated")
