"""The gated delta rule against the two implementations in transformers, in chunks and step by step."""

import pytest
import torch
from torch.nn import functional

import regard
from regard.linear import Identity, LinearState

qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("length", [1, 63, 130])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_gated_delta_rule(name, initial, length):
    query, key = torch.randn(2, 2, 3, length, 8)
    value, decay = torch.randn(2, 3, length, 5), -torch.rand(2, 3, length)
    beta, state = torch.rand(2, 3, length), torch.randn(2, 3, 8, 5) if initial else None
    key = functional.normalize(key, dim=-1)
    theirs, final = getattr(qwen3_next, name)(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        g=decay.transpose(1, 2),
        beta=beta.transpose(1, 2),
        initial_state=state,
        output_final_state=True,
    )
    ours, ours_final = regard.linear_attention_with_state(
        query,
        key,
        value,
        feature_map=Identity(),
        causal=True,
        normalize=False,
        decay=decay,
        beta=beta,
        state=None if state is None else LinearState.from_parts(state),
    )
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours_final.matrix, final, atol=1e-5, rtol=1e-4)
