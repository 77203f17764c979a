"""Sparsemax and entmax against the authors' own package (entmax, MIT), forward and gradient."""

import pytest
import torch

import regard
from regard import masks, normalizers

entmax = pytest.importorskip("entmax")

PEERS = {
    "sparsemax": (normalizers.Sparsemax(), entmax.sparsemax),
    "entmax-1.5": (normalizers.Entmax(1.5), entmax.entmax15),
    "entmax-1.25": (normalizers.Entmax(1.25), lambda scores: entmax.entmax_bisect(scores, 1.25, n_iter=100)),
}
HIDDEN = -1e9  # the package computes NaN of -inf


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("deviation", [0.1, 1.0, 5.0])
def test_output_and_gradients_are_those_of_the_package(name, dtype, bound, deviation):
    normalizer, function = PEERS[name]
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 67, 16, dtype=torch.float64).to(dtype)
    leaves = [(deviation * query).requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    ours = regard.attention(*leaves, mask=masks.causal(), normalizer=normalizer)
    above = torch.ones(67, 67, dtype=torch.bool).triu(1)
    theirs = function((leaves[0] @ leaves[1].mT / 4).masked_fill(above, HIDDEN)) @ leaves[2]
    upstream = torch.randn(ours.shape, dtype=dtype)
    for mine, other in zip(*([o, *torch.autograd.grad(o, leaves, upstream)] for o in (ours, theirs)), strict=True):
        assert (mine - other).abs().max() < bound * other.abs().max()


@pytest.mark.parametrize("shape", [(), (4,)], ids=["one", "of each head"])
def test_the_gradient_of_alpha_is_that_of_the_package(shape):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 37, 16, dtype=torch.float64)
    alpha = (1.2 + torch.rand(shape, dtype=torch.float64)).requires_grad_()
    ours = regard.attention(query, key, value, normalizer=normalizers.Entmax(alpha))
    wide = alpha.expand(4)[:, None, None].expand(2, 4, 37, 1)
    theirs = entmax.entmax_bisect(query @ key.mT / 4, wide, n_iter=100) @ value
    upstream = torch.randn_like(ours)
    mine, other = (torch.autograd.grad(output, alpha, upstream)[0] for output in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    torch.testing.assert_close(mine, other, atol=1e-7, rtol=1e-7)
