"""Models whose indexer selects keys, or blocks of keys, for each query: equal to eager attention, and none is left."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

import regard.huggingface

OF_KEYS = ("DeepseekV32", "GlmMoeDsa", "HYV4", "AXK2")
TOKENS, PADDED = 30, 7


def model_of_keys(kind: str) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        index_topk=5,
        index_n_heads=2,
        index_head_dim=16,
        pad_token_id=0,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def model_of_blocks() -> nn.Module:
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rotary_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=2,
        layer_types=["minimax_m3_sparse", "full_attention"],
        pad_token_id=0,
    )
    return MiniMaxM3VLTextModel(config).eval()


def tokens() -> tuple[Tensor, Tensor]:
    """Two texts, the second padded on its left."""
    ids = torch.arange(3, 3 + TOKENS).repeat(2, 1)
    ids[1] = ids[1].flip(0)
    padding = torch.ones_like(ids)
    padding[1, :PADDED] = 0
    return ids, padding


@pytest.fixture(params=[*OF_KEYS, "MiniMaxM3VL"])
def pair(request) -> tuple[nn.Module, nn.Module]:
    """A model with eager attention, and the same with ours."""
    torch.manual_seed(0)
    make = model_of_blocks if request.param == "MiniMaxM3VL" else lambda: model_of_keys(request.param)
    eager, ours = make(), make()
    ours.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")  # type: ignore[operator]
    swapped = regard.huggingface.swap(ours)
    assert len(swapped.replaced) == 2
    assert not swapped.skipped
    assert not swapped.warnings
    return eager, ours


def result(model: nn.Module, *arguments: Tensor, **keywords) -> Tensor:
    with torch.no_grad():
        return model(*arguments, **keywords)[0]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_whole_texts(pair):
    eager, ours = pair
    ids, padding = tokens()
    close(result(ours, ids), result(eager, ids))
    found, expected = (result(model, ids, attention_mask=padding) for model in (ours, eager))
    close(found[padding.bool()], expected[padding.bool()])


def test_a_cache(pair):
    eager, ours = pair
    ids, _ = tokens()
    found = []
    for model in (ours, eager):
        with torch.no_grad():
            first = model(ids[:, :20], use_cache=True)
            found.append(model(ids[:, 20:21], past_key_values=first.past_key_values)[0])
    close(*found)


def test_weights_are_those_of_the_selected_keys(pair):
    eager, ours = pair
    ids, _ = tokens()
    eager.set_attn_implementation("eager")
    found, expected = (model(ids, output_attentions=True).attentions for model in (ours, eager))
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    assert (found[0][..., -1, :] > 0).sum(-1).max() < TOKENS


@pytest.mark.parametrize("kind", OF_KEYS[:1])
def test_generated_text(kind):
    torch.manual_seed(0)
    model, (ids, padding) = model_of_keys(kind), tokens()
    options = {"attention_mask": padding[:, :12], "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    model.set_attn_implementation("eager")  # type: ignore[operator]
    expected = model.generate(ids[:, :12], **options)  # type: ignore[operator]
    regard.huggingface.swap(model)
    assert torch.equal(model.generate(ids[:, :12], **options), expected)  # type: ignore[operator]
