"""Which kernel computes a problem, in words; a kernel asked for by name never falls back."""

import pytest
import torch

import regard
from regard import masks, scores
from regard.errors import KernelError


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def whole(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two batches and three heads."""
    return rand(2, 3, m, 11), rand(2, 3, n, 11), rand(2, 3, n, 13)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


class TestExplain:
    def test_text(self):
        text = str(regard.explain(*whole(), mask=masks.causal()))
        assert text == (
            "attention of 5 queries over 7 keys, weights (2, 3, 5, 7), float32 on cpu\n"
            "  score: DotPairs   mask: causal()   bias: None\n"
            "-> fused      chosen: the first in order that can "
            "(1.01e+04 FLOPs, 0.000801 MiB beside inputs and output)\n"
            "   reference  not chosen: fused comes before it (1.01e+04 FLOPs, 0.0024 MiB beside inputs and output)"
        )

    def test_reasons(self):
        text = str(regard.explain(*whole(), score=scores.Additive(11, 11, 3), softcap=2.0, sinks=rand(3)))
        assert "-> reference  chosen: the first in order that can" in text
        assert "   fused      cannot: torch's operator computes dot products; this score is additive; " in text
        assert "torch's operator has no softcap; torch's operator has no sinks" in text

    def test_asked_for(self):
        text = str(regard.explain(*whole(), kernel="reference"))
        assert "-> reference  chosen: asked for by name" in text
        assert "   fused      not chosen: reference was asked for" in text

    def test_the_plan_is_what_runs(self):
        assert regard.explain(*whole()).kernel.name == "fused"
        assert regard.explain(*whole(), softcap=1.0).kernel.name == "reference"

    def test_nothing_is_computed(self):
        huge = torch.zeros(1, 1, 1, 8).expand(1, 1, 10**7, 8)
        assert regard.explain(huge, huge, huge).problem.weights_shape == (1, 1, 10**7, 10**7)


class TestKernelByName:
    def test_it_is_used(self):
        query, key, value = whole()
        close(
            regard.attention(query, key, value, kernel="reference"),
            regard.attention(query, key, value, kernel="fused"),
        )

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"score": scores.Additive(11, 11, 3)}, "this score is additive"),
            ({"softcap": 1.0}, "has no softcap"),
            ({"sinks": torch.zeros(3)}, "has no sinks"),
        ],
    )
    def test_it_never_falls_back(self, options, reason):
        with pytest.raises(KernelError, match=f"kernel 'fused' cannot compute this: .*{reason}.*regard.explain"):
            regard.attention(*whole(), kernel="fused", **options)

    def test_no_lse(self):
        with pytest.raises(KernelError, match=r"kernel 'fused' cannot compute this: .*no log-sum-exp"):
            regard.attention_with_lse(*whole(), kernel="fused")
        with pytest.raises(KernelError, match="no log-sum-exp"):
            regard.observe(*whole(), regard.lenses.Weights(), kernel="fused")

    def test_unknown_name(self):
        with pytest.raises(
            KernelError, match=r"there is no kernel 'fussed'; did you mean 'fused'\? Known: 'fused', 'ref"
        ):
            regard.attention(*whole(), kernel="fussed")
