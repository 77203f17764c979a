import pytest
import torch
from torch import nn

from regard.errors import ConfigurationError
from regard.nn import RMSNorm


def filled(norm: RMSNorm) -> RMSNorm:
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_is_the_formula(offset):
    norm, x = filled(RMSNorm(7, 0.01, offset=offset)).double(), torch.randn(2, 3, 7).double()
    expected = (norm.weight + offset) * x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt()
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=1e-12)
    assert RMSNorm(7, offset=offset)(x.float()).equal(RMSNorm(7)(x.float()))


def test_it_is_torchs_with_the_same_weight():
    norm, theirs, x = filled(RMSNorm(7)), nn.RMSNorm(7, eps=1e-6), torch.randn(2, 7)
    theirs.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), theirs(x))


@pytest.mark.parametrize("narrow_weight", [False, True])
def test_narrow_numbers_are_rounded_once(narrow_weight):
    norm, x = filled(RMSNorm(64)), (100 * torch.randn(5, 64)).bfloat16()
    norm.weight.data = norm.weight.data.bfloat16().float()
    expected = norm.double()(x.double()).bfloat16()
    norm = norm.bfloat16() if narrow_weight else norm.float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not narrow_weight):
        output = norm(x)
    assert output.dtype == torch.bfloat16
    assert (output == expected).float().mean() > 0.99  # a tie may fall either way


def test_gradients_and_errors():
    assert torch.autograd.gradcheck(
        filled(RMSNorm(5, offset=1.0)).double(), torch.randn(3, 5).double().requires_grad_()
    )
    with pytest.raises(ConfigurationError, match="dim is 0; it needs at least 1"):
        RMSNorm(0)
    with pytest.raises(ConfigurationError, match="eps is -1; it needs a number of at least 0"):
        RMSNorm(5, -1)


def test_repr():
    assert repr(RMSNorm(5, offset=1.0)) == "RMSNorm(5, eps=1e-06, offset=1.0)"
