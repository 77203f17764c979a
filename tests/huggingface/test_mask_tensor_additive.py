"""Models that know their masks as numbers that are added compute with them as with eager attention."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.bert.modeling_bert import eager_attention_forward

import regard.huggingface
from regard.huggingface.mask_tensor import LazyMaskTensor, needs_additive_masks, symbolic_mask

LEAST = torch.finfo(torch.float32).min


class ToyConfig(transformers.PreTrainedConfig):
    """Of no model but the one below."""

    model_type = "toy"
    hidden_size = 12


class Heads(nn.Module):
    """Three heads of four dimensions, without parameters."""

    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal, self.num_key_value_groups = config, True, 1

    def forward(self, states, mask):
        heads = states.unflatten(-1, (3, 4)).transpose(1, 2)
        keys = pad(heads, (0, 0, 0, mask.shape[-1] - heads.shape[-2]))
        chosen = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return chosen(self, heads, keys, keys, mask, dropout=0.0, scaling=1.0)[0]


class Toy(PreTrainedModel):
    """A model that computes something with its mask, and hands the result on."""

    config: ToyConfig  # transformers reads the class of the configuration here
    _supports_attention_backend = True
    _supports_sdpa = False

    def __init__(self, config):
        super().__init__(config)
        self.heads = Heads(config)
        self.post_init()

    def forward(self, states, compute):
        mask = masking_utils.create_causal_mask(self.config, states, None, None)
        return self.heads(states, compute(mask))


def in_place(change):
    def compute(mask):
        change(mask)
        return mask

    return compute


FIRST = torch.tensor([True, False, False, False, False])
BIAS = torch.linspace(-1.0, 1.0, 25).view(1, 1, 5, 5)
COMPUTED = {
    "padded": lambda mask: pad(mask, (0, 2), value=0.0),
    "cat": lambda mask: torch.cat([mask, torch.tensor([0.0, LEAST]).expand(2, 1, 5, 2).to(mask.dtype)], -1),
    "filled": lambda mask: mask.masked_fill(FIRST & ~torch.eye(5, dtype=torch.bool), LEAST),
    "equal": lambda mask: torch.where(mask == 0, 0.25, LEAST).expand(2, 1, 5, 5),
    "less": lambda mask: torch.zeros(2, 1, 5, 5).masked_fill(mask < 0, LEAST),
    "times": lambda mask: mask * 0.5,
    "minimum": lambda mask: torch.minimum(mask, BIAS),
    "maximum": lambda mask: torch.maximum(mask, torch.tensor(-2.0)),
    "where": lambda mask: torch.where(FIRST, mask, LEAST / 2),
    "added": lambda mask: mask + BIAS,
    "added to": lambda mask: BIAS + mask,
    "a number added": lambda mask: mask + 1.0,
    "as float": lambda mask: mask.float(),
    "as another float": lambda mask: mask.to(torch.float64).float(),
    "a part": lambda mask: mask[..., :3, :],
    "parts": lambda mask: torch.cat([mask[..., :2], mask[..., 2:]], -1),
    "a clone": lambda mask: mask.clone() - BIAS,
    "for every head": lambda mask: mask.expand(2, 3, 5, 5),
    "handed on": lambda mask: mask.contiguous().detach().to("cpu"),
    "added in place": in_place(lambda mask: mask.add_(BIAS)),
    "assigned": in_place(lambda mask: mask.__setitem__((..., 0), 0.5)),
    "a part filled": in_place(lambda mask: mask[..., :2].fill_(0.0)),
}
"""What a model may do with a mask that it takes for numbers: each means something else for booleans, or nothing."""


def both_masks():
    shape = {"batch_size": 2, "q_length": 5, "kv_length": 5, "dtype": torch.float32, "config": ToyConfig()}
    return symbolic_mask(**shape), masking_utils.eager_mask(**shape)


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_whatever_is_computed_with_it_is_as_with_eager_attentions_mask(compute):
    ours, theirs = (compute(mask) for mask in both_masks())
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.tolist() == theirs.tolist()


WHOLE = {name: compute for name, compute in COMPUTED.items() if name != "a part"}


@pytest.mark.parametrize("compute", WHOLE.values(), ids=WHOLE)
def test_a_model_that_computes_with_its_mask_is_right(compute, close):
    eager = Toy._from_config(ToyConfig(), attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    assert regard.huggingface.swap(ours).replaced == ("heads",)
    states = torch.randn(2, 5, 12)
    with torch.no_grad():
        close(ours(states, compute), eager(states, compute))
    with torch.inference_mode():
        close(ours(states, compute), eager(states, compute))


def test_as_booleans_they_are_true_where_they_are_not_0():
    ours, theirs = both_masks()
    assert ours.bool().tolist() == theirs.bool().tolist()


def test_it_looks_like_numbers_and_stays_a_symbol():
    mask, theirs = both_masks()
    assert isinstance(mask, LazyMaskTensor)
    assert (mask.dtype, mask.shape, mask.is_floating_point()) == (torch.float32, theirs.shape, True)
    for after in (mask, mask.contiguous(), mask.to(torch.float32), mask[:, :, :, :5], mask.to("meta")):
        assert isinstance(after, LazyMaskTensor)
        assert repr(after) == "LazyMaskTensor(causal(), (2, 1, 5, 5))"
        assert after.contents.elements is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_numbers_are_of_the_models_dtype(dtype):
    mask = symbolic_mask(batch_size=1, q_length=2, kv_length=2, dtype=dtype, config=ToyConfig())
    assert mask.dtype == dtype
    assert (mask + 0.0).tolist() == [[[[0.0, torch.finfo(dtype).min], [0.0, 0.0]]]]


KINDS = {"DeepseekV4": True, "Gemma2": True, "GptOss": True, "Llama": False, "Bert": False, "Gemma3Text": False}


@pytest.mark.parametrize("name", KINDS)
def test_models_say_whether_they_know_booleans(name):
    getattr(transformers, name.removesuffix("Text") + "PreTrainedModel")  # loads what says it
    kind = getattr(transformers, f"{name}Config")
    assert needs_additive_masks(kind) == KINDS[name]
    assert needs_additive_masks(type("Mine", (kind,), {})) == KINDS[name]


def test_a_configuration_of_no_model_expects_no_numbers():
    assert not needs_additive_masks(type(None))
    assert not needs_additive_masks(transformers.PreTrainedConfig)


DEEPSEEK = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "index_topk": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


@pytest.fixture
def deepseek():
    """DeepSeek V4, which adds compressed keys to those of its window, and their numbers to its mask."""
    torch.manual_seed(1)
    config = transformers.DeepseekV4Config(**DEEPSEEK)
    eager = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    assert len(regard.huggingface.swap(ours).replaced) == 3
    return eager, ours


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_deepseek_v4_is_eagers(deepseek, close, padding):
    eager, ours = deepseek
    tokens, exist = torch.randint(3, 60, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    if padding != "none":
        exist[1, slice(0, 5) if padding == "left" else slice(19, 24)] = 0
    with torch.no_grad():
        mine, theirs = (model(tokens, attention_mask=exist, output_attentions=True) for model in (ours, eager))
    close(mine, theirs, exist)
    for weights, expected in zip(mine.attentions, theirs.attentions, strict=True):
        close(weights.transpose(1, 2), expected.transpose(1, 2), exist)


def test_deepseek_v4_decodes_as_eager_does(deepseek):
    eager, ours = deepseek
    tokens = torch.randint(3, 60, (2, 14))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = eager.generate(tokens, **options)
    assert torch.equal(ours.generate(tokens, **options), expected)


def test_deepseek_v4_has_eagers_gradient(deepseek, close):
    tokens, grads = torch.randint(3, 60, (2, 24)), []
    for model in deepseek:
        model(tokens, labels=tokens).loss.backward()
        grads.append(torch.cat([tensor.grad.flatten() for tensor in model.parameters() if tensor.grad is not None]))
    close(*grads)
