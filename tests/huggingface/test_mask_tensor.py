"""A symbolic mask is a bool tensor to whoever handles it, and a symbol to our attention."""

import copy

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusEncoder

import regard.huggingface
from regard.errors import MaskError
from regard.huggingface.mask_tensor import LazyMaskTensor, symbolic_mask
from regard.masks import causal


def made(**arguments):
    mask = symbolic_mask(**arguments)
    assert isinstance(mask, LazyMaskTensor)
    return mask


@pytest.fixture
def mask():
    return made(batch_size=2, q_length=3, kv_length=5, q_offset=2)


DENSE = causal().dense(3, 5).expand(2, 1, 3, 5)


def test_it_looks_like_a_bool_tensor(mask):
    assert isinstance(mask, torch.Tensor)
    assert torch.is_tensor(mask)
    assert (mask.shape, mask.dtype, mask.ndim, mask.device.type) == ((2, 1, 3, 5), torch.bool, 4, "cpu")
    assert mask.size(-1) == len(mask[0, 0, 0]) == 5
    assert repr(mask) == "LazyMaskTensor(causal(), (2, 1, 3, 5))"


HANDED_ON = {
    "contiguous": lambda mask: mask.contiguous(),
    "to its device": lambda mask: mask.to("cpu"),
    "to its type": lambda mask: mask.to(dtype=torch.bool),
    "detach": lambda mask: mask.detach(),
    "to another device": lambda mask: mask.to("meta"),
    "all of it": lambda mask: mask[:, :, :, :5],
    "all of it, by shape": lambda mask: mask[..., : mask.shape[-1]],
    "copy": copy.copy,
}


@pytest.mark.parametrize("hand_on", HANDED_ON.values(), ids=HANDED_ON)
def test_handed_on_it_stays_a_symbol(mask, hand_on):
    after = hand_on(mask)
    assert isinstance(after, LazyMaskTensor)
    assert repr(after.symbol) == "causal()"
    assert after.contents.elements is None
    assert after.device == after.contents.extent.device == after.contents.reachable.device


COMPUTED = {
    "not": (lambda mask: ~mask, ~DENSE),
    "where": (lambda mask: torch.where(mask, 1.0, -2.0), torch.where(DENSE, 1.0, -2.0)),
    "masked_fill": (lambda mask: torch.zeros(2, 1, 3, 5).masked_fill(mask, 1.0), DENSE.float()),
    "cat": (lambda mask: torch.cat([mask, mask], -1), torch.cat([DENSE, DENSE], -1)),
    "compared": (lambda mask: mask == 0, ~DENSE),
    "all": (lambda mask: mask.all(), torch.tensor(False)),
    "whole numbers": (lambda mask: mask.long(), DENSE.long()),
    "list": (lambda mask: torch.tensor(mask.tolist()), DENSE),
    "array": (lambda mask: torch.from_numpy(mask.numpy()), DENSE),
}


@pytest.mark.parametrize(("compute", "expected"), COMPUTED.values(), ids=COMPUTED)
def test_computed_with_it_is_its_booleans(mask, compute, expected):
    after = compute(mask)
    assert type(after) is torch.Tensor
    assert torch.equal(after, expected)
    assert repr(mask.symbol) == "causal()"  # what only read it left the symbol


PARTS = {
    "some keys": (lambda mask: mask[:, :, :, :3], DENSE[..., :3]),
    "one of the batch": (lambda mask: mask[1], DENSE[1]),
    "for every head": (lambda mask: mask.expand(2, 4, 3, 5), DENSE.expand(2, 4, 3, 5)),
    "one more axis": (lambda mask: mask.unsqueeze(2), DENSE.unsqueeze(2)),
    "another shape": (lambda mask: mask.view(2, 3, 5), DENSE.reshape(2, 3, 5)),
    "a part of a part": (lambda mask: mask[:, :, 1:][..., 2:], DENSE[:, :, 1:][..., 2:]),
    "clone": (lambda mask: mask.clone(), DENSE),
}


@pytest.mark.parametrize(("part", "expected"), PARTS.values(), ids=PARTS)
def test_a_part_is_booleans_of_the_same_meaning(mask, part, expected):
    after = part(mask)
    assert isinstance(after, LazyMaskTensor)
    assert after.symbol is None
    assert after.shape == expected.shape
    assert torch.equal(after.dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", [slice(0, 5), slice(0, 3)], ids=["all of it", "a part"])
def test_added_to_scores_it_is_what_eager_attention_adds(mask, part, dtype):
    mask, dense = mask[..., part], DENSE[..., part]
    scores = torch.randn(2, 4, 3, dense.shape[-1], dtype=dtype, requires_grad=True)
    expected = scores + _added(dense, dtype)
    for after in (scores + mask, mask + scores, scores.clone().add_(mask)):
        assert torch.equal(after, expected)
    (scores + mask).sum().backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.ones_like(scores))


def test_as_floating_point_numbers_it_may_mean_either(mask):
    for convert in (lambda: mask.float(), lambda: mask[..., :3].to(torch.float16)):
        with pytest.raises(MaskError, match=r"is bool, True = attend: as torch.float\d+ it may mean"):
            convert()


def test_a_module_that_adds_its_mask_by_itself_is_right(close):
    config = transformers.BigBirdPegasusConfig(
        vocab_size=61, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, init_std=0.3
    )
    eager = BigBirdPegasusEncoder._from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    assert regard.huggingface.swap(ours).skipped
    tokens, exist = torch.randint(3, 60, (2, 11)), torch.tensor([[1] * 11, [1] * 6 + [0] * 5])
    with torch.no_grad():
        expected = eager(tokens, attention_mask=exist)
        close(ours(tokens, attention_mask=exist), expected, exist)
        assert (expected[0] - eager(tokens)[0])[1, :6].abs().max() > 1e-3


CHANGES = {
    "an operator in place": lambda mask: mask.logical_not_(),
    "a part": lambda mask: mask[:, :, 0].fill_(True),
    "an assignment": lambda mask: mask.__setitem__((slice(None), slice(None), 0), torch.tensor(True)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_in_place_is_seen(mask, change):
    before = mask.dense().clone()
    change(mask)
    assert mask.symbol is None
    assert not torch.equal(mask.dense(), before)


def test_in_inference_mode_what_was_computed_with_is_taken_as_it_is():
    with torch.inference_mode():
        mask = made(batch_size=2, q_length=3, kv_length=5, q_offset=2)
        assert repr(mask.symbol) == "causal()"
        mask[:, :, 0] = True
        assert mask.symbol is None
        assert mask.dense()[:, :, 0].all()


def test_transformers_takes_it_for_a_finished_mask(pair, ask, close):
    eager, ours = pair("mistral")
    inputs = ask("mistral")
    function = masking_utils.sliding_window_causal_mask_function(5)
    mask = made(batch_size=2, q_length=13, kv_length=13, mask_function=function)
    with torch.no_grad():
        close(ours(**inputs, attention_mask=mask), eager(**inputs))
    assert mask.contents.elements is None
    mask[..., 0] = True  # everyone sees the first token
    with torch.no_grad():
        close(ours(**inputs, attention_mask=mask), eager(**inputs, attention_mask=_added(mask.dense())))


def _added(keep, dtype=torch.float32):
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
