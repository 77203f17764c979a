"""Published blocks as configurations of LinearAttention, with the weights of transformers' eager classes in both."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.linear import (
    DeltaRule,
    FixedDecay,
    Identity,
    SoftplusDecay,
    SoftplusFeatureDecay,
    StateSpaceRule,
    SumRule,
)
from regard.nn import (
    GatedGroupNorm,
    GroupedValueProjections,
    L2Norm,
    LinearAttention,
    OutputGate,
    Projections,
    RMSNorm,
    ShortConvolution,
)
from regard.positions import Rotary

models = pytest.importorskip("transformers.models")
cache_utils = pytest.importorskip("transformers.cache_utils")

DIM, LENGTH = 32, 71
STARTS = torch.tensor([0, 5, 40])
"""Where each of three texts starts, after padding on the left."""


class Block(NamedTuple):
    """A module of transformers with random weights, its configuration, and the layer that it is here."""

    theirs: Any
    config: Any
    layer: LinearAttention


def drawn(module: nn.Module) -> Any:
    """The module with weights that make each part count."""
    torch.manual_seed(1)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            nn.init.normal_(parameter, std=1.0 if "conv" in name else parameter.shape[-1] ** -0.5)
        else:
            nn.init.uniform_(parameter, 0.2, 1.5) if "A_log" not in name else nn.init.uniform_(parameter, -1, 1)
    return module.eval()


def copied(pairs: dict[Tensor, Tensor]) -> None:
    with torch.no_grad():
        for ours, theirs in pairs.items():
            ours.copy_(theirs.reshape(ours.shape))


def gated_delta_net(
    projections: Projections, *, eps: float = 1e-6, rank: int | None = None, decay: Any = None, **gate: Any
) -> LinearAttention:
    return LinearAttention(
        projections,
        feature_map=Identity(),
        causal=True,
        decay=SoftplusDecay() if decay is None else decay,
        rule=DeltaRule(largest=gate.pop("largest", 1.0)),
        convolution=ShortConvolution(projections),
        gate=OutputGate(projections, norm=lambda dim: RMSNorm(dim, eps), rank=rank, **gate),
    ).eval()


def qwen3_next() -> Block:
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=DIM,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    )
    theirs = drawn(modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0))
    layer = gated_delta_net(
        GroupedValueProjections(DIM, 4, num_key_heads=2, head_dim=8, value_dim=6, bias=False, norm=L2Norm)
    )
    query, key, value, gate = theirs.in_proj_qkvz.weight.unflatten(0, (2, 40)).split([8, 8, 12, 12], 1)
    beta, decay = theirs.in_proj_ba.weight.unflatten(0, (2, 4)).split([2, 2], 1)
    copied(common(layer, theirs, theirs.conv1d, theirs.out_proj, theirs.norm) | maps(layer, query, key, value, gate))
    copied({layer.beta_gate.weight: beta, layer.decay_gate.weight: decay, layer.decay_gate.bias: theirs.dt_bias})  # type: ignore[union-attr, dict-item]
    return Block(theirs, config, layer)


def olmo_hybrid() -> Block:
    from transformers.models.olmo_hybrid import configuration_olmo_hybrid, modeling_olmo_hybrid

    config = configuration_olmo_hybrid.OlmoHybridConfig(
        hidden_size=DIM,
        num_hidden_layers=4,
        num_attention_heads=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=12,
    )
    theirs = drawn(modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(config, 0))
    projections = Projections(DIM, 4, head_dim=6, value_dim=12, bias=False, norm=L2Norm)
    layer = gated_delta_net(projections, eps=1e-5, largest=2.0)
    weights = (getattr(theirs, f"{name}_proj").weight for name in "qkvg")
    copied(common(layer, theirs, theirs.conv1d, theirs.o_proj, theirs.o_norm) | maps(layer, *weights))
    copied(
        {
            layer.beta_gate.weight: theirs.b_proj.weight,  # type: ignore[union-attr, dict-item]
            layer.decay_gate.weight: theirs.a_proj.weight,  # type: ignore[union-attr, dict-item]
            layer.decay_gate.bias: theirs.dt_bias,  # type: ignore[union-attr, dict-item]
        }
    )
    return Block(theirs, config, layer)


def kimi_linear() -> Block:
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

    config = configuration_kimi_linear.KimiLinearConfig(
        hidden_size=DIM, num_hidden_layers=4, linear_num_heads=3, linear_head_dim=8
    )
    theirs = drawn(modeling_kimi_linear.KimiLinearDeltaAttention(config, 0))
    projections = Projections(DIM, 3, head_dim=8, bias=False, norm=L2Norm)
    layer = gated_delta_net(projections, eps=1e-5, rank=8, decay=SoftplusFeatureDecay(rank=8), activation=torch.sigmoid)
    query, key, value = (getattr(theirs, f"{name}_proj").weight for name in "qkv")
    forget = theirs.forget_gate
    first, second = layer.decay_gate  # type: ignore[misc]
    copied(
        {
            projections.query.weight: query,
            projections.key.weight: key,
            projections.value.weight: value,
            projections.output.weight: theirs.o_proj.weight,
            layer.convolution.weight: theirs.conv1d.weight,  # type: ignore[union-attr]
            layer.gate.norm.weight: theirs.o_norm.weight,  # type: ignore[union-attr, dict-item]
            layer.gate.gate[0].weight: theirs.g_a_proj.weight,  # type: ignore[union-attr, index]
            layer.gate.gate[1].weight: theirs.g_b_proj.weight,  # type: ignore[union-attr, index]
            layer.beta_gate.weight: theirs.b_proj.weight,  # type: ignore[union-attr, dict-item]
            first.weight: forget.f_a_proj.weight,
            second.weight: forget.f_b_proj.weight,
            second.bias: forget.dt_bias,
            layer.log_decay_rates: forget.A_log,
        }
    )
    nn.init.zeros_(layer.beta_gate.bias)  # type: ignore[union-attr, arg-type]
    return Block(theirs, config, layer)


def mamba_2() -> Block:
    from transformers.models.mamba2 import configuration_mamba2, modeling_mamba2

    config = configuration_mamba2.Mamba2Config(
        hidden_size=DIM, num_heads=4, head_dim=16, n_groups=2, state_size=10, expand=2, num_hidden_layers=2
    )
    theirs = drawn(modeling_mamba2.Mamba2Mixer(config, 0))
    projections = GroupedValueProjections(DIM, 4, num_key_heads=2, head_dim=10, value_dim=16, bias=False)
    layer = LinearAttention(
        projections,
        feature_map=Identity(),
        causal=True,
        decay=SoftplusDecay(),
        rule=StateSpaceRule(),
        convolution=ShortConvolution(projections, bias=True),
        gate=GatedGroupNorm(projections, groups=2, eps=config.layer_norm_epsilon),
    ).eval()
    gate, value, key, query, decay = theirs.in_proj.weight.split([64, 64, 20, 20, 4])
    taps, bias = (torch.cat(tensor.split([64, 20, 20])[::-1]) for tensor in (theirs.conv1d.weight, theirs.conv1d.bias))
    copied(
        maps(layer, query, key, value, gate)
        | {
            layer.convolution.weight: taps,  # type: ignore[union-attr]
            layer.convolution.bias: bias,  # type: ignore[union-attr, dict-item]
            layer.decay_gate.weight: decay,  # type: ignore[union-attr, dict-item]
            layer.decay_gate.bias: theirs.dt_bias,  # type: ignore[union-attr, dict-item]
            layer.log_decay_rates: theirs.A_log,
            layer.rule_constants: theirs.D,
            layer.gate.weight: theirs.norm.weight,  # type: ignore[union-attr, dict-item]
            projections.output.weight: theirs.out_proj.weight,
        }
    )
    return Block(theirs, config, layer)


def maps(layer: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> dict[Tensor, Tensor]:
    own = layer.projections
    return {own.query.weight: query, own.key.weight: key, own.value.weight: value, layer.gate.gate.weight: gate}


def common(layer: Any, theirs: Any, convolution: Any, output: Any, norm: Any) -> dict[Tensor, Tensor]:
    nn.init.zeros_(layer.beta_gate.bias)
    return {
        layer.projections.output.weight: output.weight,
        layer.convolution.weight: convolution.weight,
        layer.gate.norm.weight: norm.weight,
        layer.log_decay_rates: theirs.A_log,
    }


BLOCKS: dict[str, Callable[[], Block]] = {
    "Qwen3-Next": qwen3_next,
    "OLMo-hybrid": olmo_hybrid,
    "Kimi Linear": kimi_linear,
    "Mamba-2": mamba_2,
}


@pytest.fixture(params=BLOCKS)
def block(request):
    return BLOCKS[request.param]()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def close(ours: Tensor, theirs: Tensor) -> None:
    assert 0.05 < float(theirs.square().mean().sqrt()) < 20
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_whole_sequence(block):
    x = torch.randn(3, LENGTH, DIM)
    close(block.layer(x), block.theirs(x))


def test_padding_on_the_left(block):
    x, keep = torch.randn(3, LENGTH, DIM), torch.arange(LENGTH) >= STARTS[:, None]
    theirs = block.theirs(x, attention_mask=keep.float())
    close(block.layer(x, mask=keep[:, None, None])[keep], theirs[keep])


@pytest.mark.parametrize("padded", [False, True])
def test_step_by_step_with_a_cache(block, padded):
    x = torch.randn(3, LENGTH, DIM)
    keep = torch.arange(LENGTH) >= STARTS[:, None] if padded else torch.ones(3, LENGTH, dtype=torch.bool)
    theirs, cache, ours = cache_utils.DynamicCache(config=block.config), block.layer.make_cache(), []
    expected = []
    for part in torch.arange(LENGTH).split([50, *[1] * (LENGTH - 50)]):
        first = part[0] == 0
        mask = keep[:, part].float() if padded and first else None  # they pad the prompt alone
        expected.append(block.theirs(x[:, part], cache_params=theirs, attention_mask=mask))
        output, cache = block.layer.step(x[:, part], cache, mask=keep[:, None, None, part] if padded else None)
        ours.append(output)
    close(torch.cat(ours, 1)[keep], torch.cat(expected, 1)[keep])
    close(torch.cat(ours, 1)[keep], block.layer(x, mask=keep[:, None, None])[keep])


def test_steps_of_any_size(block):
    x = torch.randn(2, 23, DIM)
    cache, outputs = block.layer.make_cache(), []
    for part in x.split([1, 2, 0, 7, 1, 12], 1):
        output, cache = block.layer.step(part, cache)
        outputs.append(output)
    close(torch.cat(outputs, 1), block.layer(x))
    rows = torch.tensor([1, 1, 0])
    again, _ = block.layer.step(x[rows, :3], cache.reorder(rows))
    torch.testing.assert_close(again, block.layer.step(x[:, :3], cache)[0][rows])


def test_documents_are_as_if_alone(block):
    x, ids = torch.randn(2, 19, DIM), torch.tensor([[0] * 7 + [1] * 2 + [2] * 10, [0, 1, 2] * 6 + [0]])
    output = block.layer(x, mask=regard.masks.documents(ids))
    for row in range(2):
        for document in ids[row].unique():
            chosen = ids[row] == document
            close(output[row, chosen], block.layer(x[row : row + 1, chosen])[0])


def test_gradients_reach_every_parameter(block):
    with torch.enable_grad():
        block.layer(torch.randn(2, 23, DIM)).square().sum().backward()
    for name, parameter in block.layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_retention_by_its_formula():
    """RetNet: rotary queries and keys, a fixed decay for each head, and the normed rows times a swish gate."""
    decay = (1 - 2.0 ** (-5 - torch.arange(4.0))).log()
    projections = Projections(DIM, 4, bias=False)
    layer = LinearAttention(
        projections,
        feature_map=Identity(),
        causal=True,
        decay=FixedDecay(decay),
        rule=SumRule(normalize=False),
        rotary=Rotary(8),
        gate=OutputGate(projections, norm=RMSNorm),
    ).eval()
    x = torch.randn(2, 37, DIM)
    query, key, value, gate = (
        functional.linear(x, cast("Tensor", linear.weight)).unflatten(-1, (4, 8)).transpose(1, 2)
        for linear in (projections.query, projections.key, projections.value, layer.gate.gate)  # type: ignore[union-attr]
    )
    rotation = Rotary(8).rotation(torch.arange(37))
    distance = torch.arange(37)[:, None] - torch.arange(37)
    kept = (decay.exp()[:, None, None] ** distance.clamp(min=0)).where(distance >= 0, 0.0)
    rows = (rotation.rotate(query) @ rotation.rotate(key).mT * 8**-0.5 * kept) @ value
    rows = functional.rms_norm(rows, (8,), eps=1e-6) * functional.silu(gate)
    close(layer(x), functional.linear(rows.transpose(1, 2).flatten(-2), projections.output.weight))
