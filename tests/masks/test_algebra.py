"""The algebra of masks: Boolean laws, `repr`, and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import masks
from regard.errors import MaskError, RegardError
from regard.masks import Mask

BATCH, HEADS, M, N = 2, 3, 4, 5


def booleans(*shape: int) -> st.SearchStrategy[torch.Tensor]:
    size = torch.Size(shape).numel()
    return st.lists(st.booleans(), min_size=size, max_size=size).map(lambda bits: torch.tensor(bits).view(shape))


leaves: st.SearchStrategy[Mask] = st.one_of(
    st.just(masks.causal()),
    st.lists(st.integers(0, N + 1), min_size=BATCH, max_size=BATCH).map(lambda lengths: masks.padding(lengths=lengths)),
    st.one_of(booleans(M, N), booleans(N), booleans(BATCH, 1, 1, N), booleans(BATCH, HEADS, M, 1)).map(
        lambda keep: masks.where(keep=keep)
    ),
    booleans(HEADS, M, N).map(lambda ignore: masks.where(ignore=ignore)),
)
any_mask: st.SearchStrategy[Mask] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: two[0] & two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] | two[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=4,
)
positions = st.lists(st.integers(-2, N + 2), min_size=M, max_size=M).map(torch.tensor)
law = settings(max_examples=40, deadline=None)


def dense(mask: Mask, query_positions: torch.Tensor | None = None) -> torch.Tensor:
    return mask.dense(M, N, query_positions=query_positions).expand(BATCH, HEADS, M, N)


@law
@given(a=any_mask, b=any_mask, at=positions)
def test_dense_is_a_homomorphism(a, b, at):
    assert dense(a & b, at).equal(dense(a, at) & dense(b, at))
    assert dense(a | b, at).equal(dense(a, at) | dense(b, at))
    assert dense(~a, at).equal(~dense(a, at))


@law
@given(a=any_mask, b=any_mask)
def test_de_morgan(a, b):
    assert dense(~(a & b)).equal(dense(~a | ~b))
    assert dense(~(a | b)).equal(dense(~a & ~b))


@law
@given(a=any_mask)
def test_double_negation_and_complement(a):
    assert dense(~~a).equal(dense(a))
    assert not dense(a & ~a).any()
    assert dense(a | ~a).all()
    assert dense(a & a).equal(dense(a))
    assert dense(a | a).equal(dense(a))


@law
@given(a=any_mask, b=any_mask, c=any_mask)
def test_commutative_associative_distributive_absorbing(a, b, c):
    assert dense(a & b).equal(dense(b & a))
    assert dense(a | b).equal(dense(b | a))
    assert dense((a & b) & c).equal(dense(a & (b & c)))
    assert dense((a | b) | c).equal(dense(a | (b | c)))
    assert dense(a & (b | c)).equal(dense((a & b) | (a & c)))
    assert dense(a | (b & c)).equal(dense((a | b) & (a | c)))
    assert dense(a & (a | b)).equal(dense(a))


@law
@given(mask=any_mask)
def test_the_repr_is_the_expression(mask):
    """Written out and read again, with tensors for their shapes, a mask says the same."""
    text = repr(mask)
    tensors: list[torch.Tensor] = []

    def collect(part: Mask) -> None:
        for name in ("left", "right", "mask"):
            if hasattr(part, name):
                collect(getattr(part, name))
        if hasattr(part, "pairs"):
            tensors.append(part.pairs)  # type: ignore[attr-defined]

    collect(mask)
    for tensor in tensors:
        text = text.replace(f"<bool {tuple(tensor.shape)}>", "tensors.pop(0)", 1)
    names = {"causal": masks.causal, "padding": masks.padding, "where": masks.where, "tensors": tensors}
    again = eval(text, names)
    assert dense(again).equal(dense(mask))
    assert repr(again) == repr(mask)


@pytest.mark.parametrize(
    ("mask", "written"),
    [
        (masks.causal(), "causal()"),
        (masks.padding(lengths=[3, 5]), "padding(lengths=[3, 5])"),
        (masks.where(keep=torch.ones(2, 3).bool()), "where(keep=<bool (2, 3)>)"),
        (masks.where(keep=torch.ones(3).bool()), "where(keep=<bool (1, 3)>)"),
        (masks.causal() & masks.padding(lengths=[3]), "causal() & padding(lengths=[3])"),
        (~masks.causal(), "~causal()"),
        (~~masks.causal(), "~~causal()"),
        (~(masks.causal() | masks.causal()), "~(causal() | causal())"),
        (~masks.causal() & masks.causal(), "~causal() & causal()"),
        ((masks.causal() | masks.causal()) & masks.causal(), "(causal() | causal()) & causal()"),
        (masks.causal() | masks.causal() & masks.causal(), "causal() | causal() & causal()"),
        (masks.causal() & masks.causal() & masks.causal(), "causal() & causal() & causal()"),
        (masks.causal() & (masks.causal() & masks.causal()), "causal() & (causal() & causal())"),
        (masks.causal() | masks.causal() | masks.causal(), "causal() | causal() | causal()"),
        (masks.causal() | (masks.causal() | masks.causal()), "causal() | (causal() | causal())"),
    ],
)
def test_repr(mask, written):
    assert repr(mask) == written


def test_a_mask_has_no_truth_value():
    for wrong in (
        lambda: masks.causal() and masks.padding(lengths=[1]),
        lambda: masks.causal() or masks.padding(lengths=[1]),
        lambda: not masks.causal(),
    ):
        with pytest.raises(MaskError, match=r"combine masks with & \| ~, not with and, or, not"):
            wrong()


def test_a_bool_tensor_has_to_say_what_it_means():
    for wrong in (lambda tensor: masks.causal() & tensor, lambda tensor: masks.causal() | tensor):
        with pytest.raises(
            MaskError, match=r"masks.where\(keep=tensor\), where True = attend, or masks.where\(ignore="
        ):
            wrong(torch.ones(3, 3).bool())


@pytest.mark.parametrize(
    ("other", "has"),
    [(torch.ones(3, 3), r"a torch.float32 tensor \(3, 3\)"), (None, "None"), ("causal", "a str"), (1, "a int: pass")],
)
def test_only_masks_join_masks(other, has):
    with pytest.raises(MaskError, match=rf"a mask is needed here.*; this is {has}"):
        _ = masks.causal() & other


def test_masks_of_different_batches_do_not_join():
    wrong = masks.padding(lengths=[1, 2]) & masks.padding(lengths=[1, 2, 3])
    text = r"padding\(lengths=\[1, 2\]\) has the shape \(2, 1, 1, 5\) and padding\(lengths=\[1, 2, 3\]\) \(3, 1, 1, 5\)"
    for mask in (wrong, masks.causal() | ~wrong):
        with pytest.raises(MaskError, match=text):
            mask.dense(4, 5)


def test_masks_are_values():
    assert masks.causal() == masks.causal()
    assert masks.causal() & ~masks.causal() == masks.causal() & ~masks.causal()
    assert masks.causal() | masks.causal() != masks.causal() & masks.causal()
    assert len({masks.causal(), masks.causal()}) == 1
    assert issubclass(MaskError, RegardError)
    assert issubclass(MaskError, ValueError)
