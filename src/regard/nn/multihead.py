"""A drop-in replacement of `torch.nn.MultiheadAttention` on regard's kernels, with the same masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from numbers import Real
from operator import add, and_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ..attention import attention, attention_with_lse, observe
from ..biases import Bias, tensor
from ..core.finite import all_finite, waits
from ..core.score_forms import zero_nonfinite
from ..core.tensor_memo import memoize_by_tensors
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DeviceError, DtypeError, MaskError, ShapeError
from ..kernels.validation import make_problem
from ..lenses import Weights
from ..masks import Mask, causal, from_multihead, where
from ..utils.numbers import whole_number
from .input_checks import check_tensors, refuse_scripting


def check_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int | None, int, int, int],
    is_causal: bool,
    device: torch.device,
) -> None:
    """Check torch's two mask tensors, bool or float; sizes are batch (or None), heads, queries and keys.

    Raises:
        MaskError: another dtype or shape; `is_causal` without `attn_mask`.
        DeviceError: one is not on the device of the queries.
    """
    batch, heads, queries, keys = sizes
    if is_causal and attn_mask is None:
        raise MaskError(
            "is_causal is a hint that attn_mask is causal, and needs attn_mask: pass it as "
            "nn.Transformer.generate_square_subsequent_mask(M), or torch.ones(M, M, dtype=torch.bool).triu(1)"
        )
    if key_padding_mask is not None:
        shapes = {"(keys,)": (keys,)} if batch is None else {"(batch, keys)": (batch, keys)}
        _check_mask("key_padding_mask", key_padding_mask, shapes, device)
    if attn_mask is not None:
        per_head = (1 if batch is None else batch) * heads, queries, keys
        shapes = {"(queries, keys)": (queries, keys), "(batch · heads, queries, keys)": per_head}
        _check_mask("attn_mask", attn_mask, shapes, device)


def convert_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, extra_keys: int
) -> tuple[Mask | None, Bias | None]:
    """Torch's two mask tensors as a mask and a bias; the last `extra_keys`, which the layer adds, are never masked."""
    tensors = tuple(each for each in (attn_mask, key_padding_mask) if each is not None)
    if not tensors or not waits(tensors[0]):
        return _read_masks(attn_mask, key_padding_mask, heads, extra_keys)
    what = "multihead", attn_mask is None, key_padding_mask is None, heads, extra_keys
    return memoize_by_tensors(tensors, what, lambda: _read_masks(attn_mask, key_padding_mask, heads, extra_keys))


def _read_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, extra_keys: int
) -> tuple[Mask | None, Bias | None]:
    """`convert_masks`, which has to see their numbers."""
    ignored_pairs, pair_bias = _split_mask(attn_mask, extra_keys)
    ignored_keys, key_bias = _split_mask(key_padding_mask, extra_keys)
    masks: list[Mask] = []
    if ignored_pairs is not None:
        masks.append(causal() if _is_causal(ignored_pairs) else from_multihead(ignored_pairs, heads=heads))
    if ignored_keys is not None:
        # `from_multihead` reads values to recognise padding at the end, which a compiled call has not.
        over_pairs = ignored_keys if ignored_keys.ndim == 1 else ignored_keys[:, None, None, :]
        masks.append(where(ignore=over_pairs) if under_transform() else from_multihead(key_padding_mask=ignored_keys))
    biases: list[Bias] = []
    if pair_bias is not None:
        biases.append(tensor(pair_bias if pair_bias.ndim == 2 else pair_bias.unflatten(0, (-1, heads))))
    if key_bias is not None:
        biases.append(tensor(key_bias if key_bias.ndim == 1 else key_bias[:, None, None, :]))
    return reduce(and_, masks) if masks else None, reduce(add, biases) if biases else None


def _check_mask(name: str, mask: object, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
    if not isinstance(mask, Tensor):
        raise MaskError(
            f"{name} is a {type(mask).__name__}; it needs a tensor: bool, where True = leave out, or floats that are "
            "added to the scores"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise MaskError(
            f"{name} is {mask.dtype}, whose polarity is not clear; it needs bool, where True = leave out, or floats "
            "that are added to the scores. If 1 means leave out, pass the tensor's .bool()"
        )
    if tuple(mask.shape) not in shapes.values():
        needs = " or ".join(f"{word} {shape}" for word, shape in shapes.items())
        raise MaskError(f"{name} has the shape {tuple(mask.shape)}; it needs {needs}")
    if mask.device != device:
        raise DeviceError(
            f"{name} is on {mask.device}, but query, key and value are on {device}: move it with .to({str(device)!r})"
        )


def _split_mask(mask: Tensor | None, extra_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """A mask as bool, True = ignore, and as an additive bias of the rest; None for a part without effect."""
    if mask is None:
        return None, None
    if extra_keys:
        mask = torch.cat([mask, mask.new_zeros(*mask.shape[:-1], extra_keys)], dim=-1)
    if mask.dtype == torch.bool:
        return mask if under_transform() or mask.any() else None, None
    ignored = mask == -math.inf
    bias = mask.masked_fill(ignored, 0.0)
    return (
        ignored if under_transform() or ignored.any() else None,
        bias if under_transform() or bias.requires_grad or bias.any() else None,
    )


def _is_causal(ignored: Tensor) -> bool:
    """Whether exactly the later keys are ignored; first and last row are compared first, as most masks differ there."""
    if under_transform() or ignored.ndim != 2 or ignored.shape[0] != ignored.shape[1]:
        return False
    if ignored[-1].any() or not ignored[0, 1:].all():
        return False
    return ignored.equal(torch.ones_like(ignored).triu(1))


WEIGHTS = Weights()
"""The lens for all weights."""


def _disable_fast_path(module: nn.Module, arguments: tuple) -> None:
    """A forward pre-hook that does nothing but disable the fast path of torch's encoder layer.

    Without a hook that layer computes attention itself in evaluation, from the parameters, and never calls the module.
    """


class MultiheadAttention(nn.MultiheadAttention):
    """concat(head_1, ..., head_H) · W_O, where head_h = softmax(Q W_h^Q (K W_h^K)ᵀ / √D + masks) · V W_h^V.

    A drop-in replacement of `torch.nn.MultiheadAttention`: arguments, defaults, attributes, parameter names,
    initialisation, `state_dict`, the meaning of masks and the results are the same. It is a subclass, so `isinstance`
    checks for torch's layer accept it. `swap` replaces torch's layers in a whole model.

    It differs where torch's own results are wrong or depend on the code path:

    - A row that may attend to nothing has weights 0, and as output the bias of the output projection; never NaN.
    - `attn_mask` is always applied. torch drops it for `is_causal` on some paths; here the tensor is compared, and a
      causal one is computed as `masks.causal()`, with `is_causal` or without.
    - NaN in keys or values that are masked reaches no other row, no weight, and no gradient.
    - With dropout, the returned weights are those before it (torch: after it).
    - Without `need_weights` the weights are not stored, forward or backward.
    - Wrong input raises errors of `regard.errors`, which are `ValueError`s and name the shapes.

    Nested tensors are refused; torch's encoder creates them in evaluation, unless `use_nested_tensor` is False.

    Args:
        embed_dim: E, of queries and output: heads · D.
        num_heads: H, which divides E.
        dropout: probability of dropping a weight in training, in [0, 1]; with 1 the attention is 0.
        bias: whether the four projections have one.
        add_bias_kv: whether a learned key and value are appended.
        add_zero_attn: whether a key and value of zeros are appended.
        kdim: the dim of keys, E by default.
        vdim: the dim of values, E by default.
        batch_first: whether tensors are (batch, length, dim), and not (length, batch, dim).
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigurationError: numbers below 1, heads that do not divide `embed_dim`, a dropout that is no probability.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2.

    >>> import torch
    >>> from regard.nn import MultiheadAttention
    >>> layer = MultiheadAttention(8, 2, batch_first=True)
    >>> x, padded = torch.randn(2, 3, 8), torch.tensor([[False, True, True], [True, True, True]])
    >>> output, weights = layer(x, x, x, key_padding_mask=padded)
    >>> weights.detach().round(decimals=4)
    tensor([[[1., 0., 0.],
             [1., 0., 0.],
             [1., 0., 0.]],
            [[0., 0., 0.],
             [0., 0., 0.],
             [0., 0., 0.]]])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        embed_dim, num_heads = whole_number("embed_dim", embed_dim), whole_number("num_heads", num_heads)
        if embed_dim % num_heads:
            raise ConfigurationError(
                f"embed_dim is {embed_dim} and num_heads {num_heads}; heads share the dim evenly: num_heads must "
                "divide embed_dim"
            )
        kdim, vdim = (
            None if dim is None else whole_number(name, dim) for name, dim in (("kdim", kdim), ("vdim", vdim))
        )
        if not isinstance(dropout, Real) or not 0.0 <= dropout <= 1.0:
            raise ConfigurationError(f"dropout is {dropout!r}; it needs a probability in [0, 1]")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.register_forward_pre_hook(_disable_fast_path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if _disable_fast_path not in self._forward_pre_hooks.values():
            self.register_forward_pre_hook(_disable_fast_path)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights, which are None without `need_weights`.

        Shapes: query (batch, M, E), key (batch, N, kdim), value (batch, N, vdim) with `batch_first`, else with the
        length in front; without a batch (M, E), (N, kdim), (N, vdim). The output is like the query. Weights are
        (batch, M, N), or (batch, heads, M, N) if not averaged; N counts the keys that the layer adds.

        Args:
            query: the input of the query projection.
            key: the input of the key projection.
            value: the input of the value projection.
            key_padding_mask: (batch, N), or (N,) without a batch: bool, where True = leave out, or floats that are
                added to the scores.
            need_weights: whether the weights are returned.
            attn_mask: (M, N) or (batch · heads, M, N), likewise: True = leave out, floats are added.
            average_attn_weights: whether the weights are the mean over the heads.
            is_causal: a hint that `attn_mask` is causal, which has to be there too; it changes no result.

        Raises:
            ShapeError: query, key and value that do not fit the layer or each other, or are nested.
            DtypeError, DeviceError: tensors of another dtype than the layer's, but under autocast; on another device.
            MaskError: a mask of another shape or type; `is_causal` without `attn_mask`.
        """
        self._check(query, key, value)
        batch, queries, keys = self._sizes(query, key)
        check_masks(attn_mask, key_padding_mask, (batch, self.num_heads, queries, keys), is_causal, query.device)
        extra_keys = (self.bias_k is not None) + self.add_zero_attn
        mask, bias = convert_masks(attn_mask, key_padding_mask, self.num_heads, extra_keys)
        # The gradient of a projection is a sum over all positions, the masked ones too, and 0 times NaN is NaN.
        unread = under_transform() or waits(query)
        careful = mask is not None and torch.is_grad_enabled() and (unread or not all_finite(query, key, value))
        q, k, v = (self._per_head(x) for x in self._project(query, key, value, careful))  # [B, H, M or N, D]
        k, v = self._with_extra_keys(k, self.bias_k), self._with_extra_keys(v, self.bias_v)
        dropped = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"mask": mask, "bias": bias, "dropout_p": dropped if dropped != 1 else 0.0}
        context, weights = _with_weights(q, k, v, options) if need_weights else (attention(q, k, v, **options), None)
        if dropped == 1:  # all weights are dropped, which no kernel computes; NaN that is attended to stays NaN
            context = context * 0.0
        if weights is None:
            return self._output(context, query.ndim, careful), None
        weights = (weights.mean(1) if average_attn_weights else weights).to(context.dtype)
        return self._output(context, query.ndim, careful), weights if query.ndim == 3 else weights.squeeze(0)

    __prepare_scriptable__ = refuse_scripting

    def _project(self, query: Tensor, key: Tensor, value: Tensor, careful: bool) -> tuple[Tensor, ...]:
        """Q W^Q, K W^K and V W^V, as one product where query, key and value are the same tensor."""
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key and key is value:
            return _linear(query, self.in_proj_weight, self.in_proj_bias, careful).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        inputs = query, key, value
        return tuple(_linear(x, w, b, careful) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _per_head(self, x: Tensor) -> Tensor:
        """The layer's layout to (batch, heads, length, D), with a batch of 1 where there is none."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.ndim == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _with_extra_keys(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values (batch, heads, N, D) with the learned one and zeros of the layer appended."""
        if learned is not None:
            last = learned.view(1, 1, self.num_heads, self.head_dim).transpose(1, 2)
            x = torch.cat([x, last.expand(x.shape[0], -1, -1, -1).to(x.dtype)], dim=-2)
        return pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _output(self, context: Tensor, axes: int, careful: bool) -> Tensor:
        """Heads (batch, heads, M, D) concatenated in the layer's layout, and projected."""
        if axes == 2:
            context = context.squeeze(0).transpose(0, 1)
        else:
            context = context.transpose(1, 2) if self.batch_first else context.permute(2, 0, 1, 3)
        context = context.flatten(-2)
        return _apply_to_finite_rows(self.out_proj, context) if careful else self.out_proj(context)

    def _sizes(self, query: Tensor, key: Tensor) -> tuple[int | None, int, int]:
        """Batch size, None where there is none, number of queries, number of keys."""
        if query.ndim == 2:
            return None, query.shape[0], key.shape[0]
        length = 1 if self.batch_first else 0
        return query.shape[1 - length], query.shape[length], key.shape[length]

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check dtype, device, layout and dims of the three inputs."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        check_tensors(query, key, value, weight)
        if self.in_proj_bias is not None and self.in_proj_bias.dtype is not weight.dtype:
            self._check_bias_dtype(weight)
        if query.is_nested or key.is_nested or value.is_nested:
            raise ShapeError(
                "MultiheadAttention got a nested tensor; it needs padded ones and key_padding_mask. If nn."
                "TransformerEncoder made it, set encoder.use_nested_tensor = False, as regard.nn.swap(model) does"
            )
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        layout = "(batch, length, dim)" if self.batch_first else "(length, batch, dim)"
        if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3):
            raise ShapeError(f"{shapes}: all three need to be {layout}, or all three (length, dim)")
        dims = self.embed_dim, self.kdim, self.vdim
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != dims:
            raise ShapeError(f"{shapes}: their last axes need to be embed_dim, kdim and vdim of the layer, {dims}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(f"{shapes}: each key needs one value, but they differ in length or batch")
        batch, key_batch = self._sizes(query, key)[0], self._sizes(key, query)[0]
        if batch != key_batch:
            raise ShapeError(
                f"{shapes}: with batch_first={self.batch_first} these are {layout}, and their batches differ, {batch} "
                f"and {key_batch}"
            )

    def _check_bias_dtype(self, weight: Tensor) -> None:
        """Refuse a bias of another dtype than the weights, unless autocast casts both."""
        if not torch.is_autocast_enabled(weight.device.type):
            raise DtypeError(
                f"in_proj_bias is {self.in_proj_bias.dtype}, but the weights of the projections are {weight.dtype}: "
                f"convert the whole layer, with layer.to({weight.dtype})"
            )


def _with_weights(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output of attention, and its weights before dropout, (batch, heads, M, N)."""
    if not under_transform():
        seen = observe(q, k, v, WEIGHTS, **options)
        return seen.output, seen[WEIGHTS]
    # `observe` checks values for NaN, which a compiled call cannot: here NaN is replaced without a check.
    context, lse = attention_with_lse(q, k, v, **options)
    problem = make_problem(zero_nonfinite(q), zero_nonfinite(k), v, mask=options["mask"], bias=options["bias"])
    return context, WEIGHTS.compute(problem, lse)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, careful: bool) -> Tensor:
    return _apply_to_finite_rows(lambda clean: linear(clean, weight, bias), x) if careful else linear(x, weight, bias)


def _apply_to_finite_rows(project: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A projection of the finite rows; the others become NaN, and reach no gradient."""
    return project(zero_nonfinite(x)).masked_fill(~x.isfinite().all(-1, keepdim=True), math.nan)
