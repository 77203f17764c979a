"""attention-gym's modifiers (BSD): ours are theirs, and theirs run here as torch's FlexAttention runs them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import regard
from regard import biases, linear, masks, normalizers
from regard.masks import Mask

from .repositories import file_of, part_of

REPOSITORY = "attention-gym"
GYM_MASKS, MODS = (part_of(REPOSITORY, "attn_gym", name) for name in ("masks", "mods"))
LENGTH, HEADS, DIM = 60, 4, 16
OFFSETS = torch.tensor([0, 13, 17, 44, 60], dtype=torch.int32)
DOCUMENT = torch.arange(4).repeat_interleave(OFFSETS.diff())
GLOBAL = [0, 29]
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 5]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def marked() -> Tensor:
    tokens = torch.zeros(LENGTH, dtype=torch.bool)
    tokens[GLOBAL] = True
    return tokens


def document_of(mask: Mask) -> Mask:
    return masks.documents(DOCUMENT) & mask


NATIVE: dict[str, tuple[Any, Mask]] = {
    "causal": (GYM_MASKS.causal_mask, masks.causal()),
    "sliding window": (GYM_MASKS.generate_sliding_window(9), masks.causal() & masks.window(before=9)),
    "prefix": (GYM_MASKS.generate_prefix_lm_mask(11), masks.causal() | masks.prefix(11)),
    "documents": (
        GYM_MASKS.generate_doc_mask_mod(GYM_MASKS.causal_mask, OFFSETS),
        document_of(masks.causal()),
    ),
    "packed documents": (GYM_MASKS.generate_packed_causal_doc_mask_mod(OFFSETS), document_of(masks.causal())),
    "dilated": (GYM_MASKS.generate_dilated_sliding_window(8, 3), masks.dilated(before=2, step=3, after=2)),
    "global and window": (
        GYM_MASKS.generate_global_sliding_window(4, marked()),
        masks.window(4, 4) | masks.global_tokens(GLOBAL),
    ),
}
"""Their mask, and ours that has a name of its own."""

AS_THEY_ARE: dict[str, Any] = {
    **{name: theirs for name, (theirs, _) in NATIVE.items()},
    "neighbourhood": GYM_MASKS.generate_natten(10, 6, 3, 3),
    "block diffusion": GYM_MASKS.generate_block_diffusion_mask(30, 7),
    "shared prefix": GYM_MASKS.generate_shared_prefix_mask_mod(OFFSETS, torch.tensor([0, 0, 0, 3])),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, DIM).unbind()
    return query, key, value


def flex(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Any:
    block = None if mask is None else create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(query, key, value, block_mask=block, **options)


def close(ours: Tensor, theirs: Tensor, record: Callable) -> None:
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    record("difference", difference)
    assert difference < 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", NATIVE)
def test_a_mask_of_ours_has_the_pairs_of_theirs(name):
    theirs, ours = NATIVE[name]
    assert torch.equal(masks.from_mod(theirs).dense(LENGTH, LENGTH), ours.dense(LENGTH, LENGTH))


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_a_mask_of_theirs_runs_here_as_there(name, record_property):
    theirs, tensors = AS_THEY_ARE[name], inputs()
    close(regard.attention(*tensors, mask=masks.from_mod(theirs)), flex(*tensors, mask=theirs), record_property)


def test_a_tree_of_drafted_tokens(record_property):
    ancestors = GYM_MASKS.build_tree_ancestor_matrix(PARENTS, device="cpu")
    theirs = GYM_MASKS.generate_jetspec_tree_causal_mask_mod(LENGTH - len(PARENTS), ancestors)
    query, key, value = inputs()
    query = query[:, :, : len(PARENTS)]
    keep = torch.cat([torch.ones(8, LENGTH - 8, dtype=torch.bool), ancestors], -1)
    block = create_block_mask(theirs, None, None, 8, LENGTH, device="cpu")
    found = regard.attention(
        *(query, key, value), mask=masks.from_mod(theirs), query_positions=torch.arange(8), key_positions=range(LENGTH)
    )
    torch.testing.assert_close(regard.attention(query, key, value, mask=keep), found)
    close(found, flex_attention(query, key, value, block_mask=block), record_property)


def test_alibi(record_property):
    tensors, causal = inputs(), GYM_MASKS.causal_mask
    theirs = flex(*tensors, mask=causal, score_mod=MODS.generate_alibi_bias(HEADS))
    ours = regard.attention(*tensors, mask=masks.causal(), bias=biases.alibi(HEADS))
    close(ours, theirs, record_property)


def test_softcap(record_property):
    tensors = inputs()
    theirs = flex(*tensors, score_mod=MODS.generate_tanh_softcap(2))
    close(regard.attention(*tensors, softcap=2.0), theirs, record_property)


def test_sandwich(record_property):
    tensors, theirs = inputs(), MODS.generate_sandwich_bias(HEADS, LENGTH)
    ours = regard.attention(*tensors, bias=biases.from_mod(theirs, heads=HEADS))
    close(ours, flex(*tensors, score_mod=theirs), record_property)


def test_sigmoid(record_property):
    query, key, value = inputs()
    modifier = MODS.generate_activation_score_mod(torch.sigmoid, 1.0)
    output, rest = flex(query, key, value, score_mod=modifier, return_aux=AuxRequest(lse=True))
    theirs = MODS.undo_softmax(output, rest.lse, value.sum(-2, keepdim=True), 1.0)
    ours = regard.attention(query, key, value, normalizer=normalizers.Sigmoid(0.0))
    close(ours, theirs, record_property)


def test_the_gated_delta_rule(record_property):
    theirs = file_of(REPOSITORY, "attn_gym/linear/gdn/impl/reference.py")
    query, key, value = inputs()
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = torch.randn(2, 2, HEADS, LENGTH).unbind()
    decay, beta = -decay.exp() / 4, beta.sigmoid()
    found, _ = theirs.recurrent_forward(
        query, key, value, decay, beta, scale=None, initial_state=None, return_final_state=False
    )
    ours = regard.linear_attention(
        query, key, value, feature_map=linear.Identity(), normalize=False, causal=True, decay=decay, beta=beta
    )
    close(ours, found, record_property)
