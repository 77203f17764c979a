"""Rotary positions and scalings against those of transformers, if it is installed."""

import math

import pytest
import torch

from regard.positions import DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, YaRN, yarn_attention_factor

pytest.importorskip("transformers", minversion="5.0")

from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

HEADS, TRAINED = 2, 64
FACTORS = {"short_factor": [1 + pair / 10 for pair in range(8)], "long_factor": [2.0 + pair for pair in range(8)]}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
ATTENTION = {"mscale": 0.707, "mscale_all_dim": 1.3}
# For heads of 16: what their configuration says, and what it is here.
SCALINGS = [
    ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, TRAINED)),
    ({"rope_type": "yarn", "factor": 4.0} | ORIGINAL, YaRN(4.0, TRAINED)),
    (
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False} | ORIGINAL,
        YaRN(32.0, TRAINED, beta_fast=8.0, beta_slow=2.0, truncate=False),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5} | ORIGINAL,
        YaRN(4.0, TRAINED, attention_factor=1.5),
    ),
    (
        {"rope_type": "yarn", "factor": 40.0} | ATTENTION | ORIGINAL,
        YaRN(40.0, TRAINED, attention_factor=yarn_attention_factor(40.0, 0.707) / yarn_attention_factor(40.0, 1.3)),
    ),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
        Llama3(8.0, TRAINED),
    ),
    (
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 6.0} | ORIGINAL,
        Llama3(32.0, TRAINED, low_frequency_factor=0.5, high_frequency_factor=6.0),
    ),
    (
        {"rope_type": "longrope", "factor": 4.0} | FACTORS | ORIGINAL,
        LongRoPE(FACTORS["short_factor"], FACTORS["long_factor"], TRAINED, 4.0),
    ),
]
BASES = [10000.0, 500000.0]
scalings = pytest.mark.parametrize(("theirs", "scaling"), SCALINGS, ids=lambda value: repr(value)[:40])
bases = pytest.mark.parametrize("base", BASES)


def configuration(theirs, base, head_dim=16):
    return LlamaConfig(
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_theta": base} | theirs,
    )


@scalings
@bases
@pytest.mark.parametrize("length", [3, TRAINED, TRAINED + 1, 5 * TRAINED])
def test_frequencies_are_the_same_function(theirs, scaling, base, length, monkeypatch):
    """Computed by their code, which says `torch.float` and `torch.float32`, with these two names meaning float64."""
    config, compute = configuration(theirs, base), ROPE_INIT_FUNCTIONS[theirs["rope_type"]]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        expected, magnitude = compute(config, seq_len=length)
    found = Rotary(16, base, scaling=scaling).frequencies(torch.arange(length))
    # LongRoPE's exponents come from .float(), and stay in float32.
    budget = math.log(base) * 2**-23 if isinstance(scaling, LongRoPE) else 1e-12
    torch.testing.assert_close(found, expected, atol=0, rtol=budget, check_dtype=False)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize(("theirs", "scaling"), [({"rope_type": "default"}, None), *SCALINGS[:-1]])
@bases
@pytest.mark.parametrize("length", [TRAINED // 2, 2 * TRAINED])
def test_a_llama_turns_queries_and_keys_so(theirs, scaling, base, length):
    embedding = modeling_llama.LlamaRotaryEmbedding(configuration(theirs, base))
    query, key = torch.randn(3, HEADS, length, 16), torch.randn(3, 1, length, 16)
    positions = torch.stack([torch.arange(length)] * 2 + [torch.arange(length).flip(0)])
    expected = modeling_llama.apply_rotary_pos_emb(query, key, *embedding(query, positions))
    rotation = Rotary(16, base, scaling=scaling).rotation(positions)
    check((rotation.rotate(query), rotation.rotate(key)), expected, base, length)


def test_gpt_neox_turns_the_first_features():
    length = 9
    config = GPTNeoXConfig(
        hidden_size=HEADS * 16,
        num_attention_heads=HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    embedding = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)
    query, key, positions = torch.randn(2, HEADS, length, 16), torch.randn(2, HEADS, length, 16), torch.arange(length)
    expected = modeling_gpt_neox.apply_rotary_pos_emb(query, key, *embedding(query, positions[None]))
    rotation = Rotary(8).rotation(positions)
    check((rotation.rotate(query), rotation.rotate(key)), expected, 10000.0, length)


def test_gpt_j_turns_neighbours():
    length = 9
    sines, cosines = modeling_gptj.create_sinusoidal_positions(length, 8).chunk(2, dim=-1)
    query = torch.randn(2, length, HEADS, 8)
    expected = modeling_gptj.apply_rotary_pos_emb(query, sines[None], cosines[None]).transpose(1, 2)
    turned = Rotary(8, layout="interleaved").rotate(query.transpose(1, 2), torch.arange(length))
    check((turned,), (expected,), 10000.0, length)


def check(found, expected, base, length):
    # Their frequencies are powers in float32, off by a part of (ln base + 2) · 2⁻²⁴, and so, times the position, are
    # their angles, which they round once more; a product with features of up to 6 follows.
    angle = length * (math.log(base) + 3) * 2**-24
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=6 * 2 * angle, rtol=0)
