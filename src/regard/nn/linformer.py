"""Linformer: softmax attention to a fixed number of learned mixtures of keys and of values."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..attention import attention
from ..biases import Bias
from ..errors import ConfigurationError, MaskError, ShapeError
from ..kernels.hooks import refuse_mixtures
from ..linear.linear_mask import read_mask
from ..masks import Mask
from ..positions import Rotation
from ..utils.numbers import whole_number
from .input_checks import check_positions, probability, refuse_scripting
from .layer_arguments import check_no_rotation
from .projections import Projections

NOT_CAUSAL = (
    "Linformer cannot be causal: each of its projected keys is a mixture of all positions, the later ones too, so that "
    "no mask can hide these from a query. regard.nn.LinearAttention and PerformerAttention can be causal"
)

NO_TOKEN_WEIGHTS = (
    "Linformer has no weights of tokens to observe: each of its keys is a mixture of all positions. Observe the other "
    "layers, or use regard.nn.Attention"
)


class LengthProjection(nn.Module):
    """E X: a learned projection along the length, (batch, heads, N, d) to (batch, heads, rank, d).

    Shorter inputs use the first columns of E.

    Args:
        max_length: the longest N.
        rank: k, how many mixtures of the positions there are.
        num_heads: 1 for a projection that all heads share, or the number of key heads for one of each.

    Source: Wang et al. 2020 (arXiv 2006.04768), section 4.

    >>> LengthProjection(max_length=100, rank=8)(torch.zeros(2, 4, 77, 16)).shape
    torch.Size([2, 4, 8, 16])
    """

    def __init__(self, max_length: int, rank: int, num_heads: int = 1) -> None:
        super().__init__()
        self.max_length, self.rank = whole_number("max_length", max_length), whole_number("rank", rank)
        self.num_heads = whole_number("num_heads", num_heads)
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.rank, self.max_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise normal with deviation 1/√rank, as in the proof of the paper's Theorem 2."""
        nn.init.normal_(self.weight, std=self.rank**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """E X of each head.

        Raises:
            ShapeError: an input longer than max_length, or another number of heads.
        """
        heads, length = x.shape[1:3]
        if length > self.max_length:
            raise ShapeError(
                f"the input has {length} positions, but the projection was built for at most max_length="
                f"{self.max_length}: build it longer, or shorten the input"
            )
        if self.num_heads not in (1, heads):
            raise ShapeError(
                f"the projection has {self.num_heads} heads and the input {heads} key heads: it needs as many, or 1 "
                "that all share"
            )
        return self.weight[..., :length].to(x.dtype) @ x

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}, rank={self.rank}, num_heads={self.num_heads}"


class LinformerAttention(nn.Module):
    """concat_h( softmax( Q_h (E K_h)ᵀ / √d ) (F V_h) ) W_o: attention to `rank` mixtures, linear in the length.

    E and F are shared by heads where they have one head, with each other where `value_length` is left out, and by
    layers to which the same `LengthProjection` is passed. It cannot be causal: each mixture has all positions in it.

    Shapes: query (batch, M, dim), memory (batch, N, memory_dim), output (batch, M, dim), N at most max_length.

    Args:
        projections: dims, heads and the linear maps.
        key_length: E.
        value_length: F; E by default.
        causal: False; for True the error says why it cannot be.
        dropout: probability of dropping a weight in training.

    Raises:
        ConfigurationError: causal, or an argument of another kind.

    Source: Wang et al. 2020 (arXiv 2006.04768), Eq. 7; sharing in section 4.

    >>> import torch, regard
    >>> shared = regard.nn.LengthProjection(max_length=100, rank=8)
    >>> layers = [regard.nn.LinformerAttention(regard.nn.Projections(16, num_heads=4), shared) for _ in range(2)]
    >>> x = torch.randn(2, 77, 16)
    >>> layers[1](layers[0](x)).shape
    torch.Size([2, 77, 16])
    """

    def __init__(
        self,
        projections: Projections,
        key_length: LengthProjection,
        value_length: LengthProjection | None = None,
        *,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if causal:
            raise ConfigurationError(NOT_CAUSAL)
        for name, projection in (("key_length", key_length), ("value_length", value_length)):
            if not isinstance(projection, LengthProjection) and (name == "key_length" or projection is not None):
                raise ConfigurationError(f"{name} needs a LengthProjection; it is a {type(projection).__name__}")
        if value_length is not None and value_length.rank != key_length.rank:
            raise ConfigurationError(
                f"key_length has the rank {key_length.rank} and value_length {value_length.rank}: each mixture of keys "
                "needs one of values"
            )
        self.projections = projections
        self.key_length = key_length
        self.value_length = key_length if value_length is None else value_length
        self.dropout = probability("dropout", dropout)

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attention of a sequence to itself, or to a memory.

        Args:
            query: (batch, M, dim), source of the queries; without a memory also of keys and values.
            memory: (batch, N, memory_dim), source of keys and values.
            mask: padding, `masks.padding(lengths)` or bool (batch, 1, 1, N): such keys are left out of the mixtures.
            bias: None: a mixture of keys has no position.
            positions: of the query's tokens, for the mask; 0..M-1 by default.
            rotation: None.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit; more positions than max_length.
            MaskError: a mask of pairs, causal among them.
            ConfigurationError: a bias or a rotation.
        """
        check_no_rotation(rotation)
        if bias is not None:
            raise ConfigurationError(
                "Linformer has no bias, as a mixture of keys has no position: leave bias out, or use "
                "regard.nn.Attention"
            )
        refuse_mixtures()
        source = query if memory is None else memory
        queries = self.projections.queries(query)
        keys, values = self.projections.keys_and_values(source)
        exists = self._kept_keys(mask, source, positions if memory is None else None)
        if exists is not None:
            keys, values = keys.where(exists, 0.0), values.where(exists, 0.0)
        context = attention(
            queries, self.key_length(keys), self.value_length(values), dropout_p=self.dropout if self.training else 0.0
        )
        if exists is not None:  # a sequence without keys, whose mixtures are all 0
            context = context.where(exists.any(2, keepdim=True), 0.0)
        return self.projections.project_output(context)

    def _kept_keys(self, mask: Mask | Tensor | None, source: Tensor, positions: Tensor | None) -> Tensor | None:
        """Which keys exist, (batch or 1, 1, N, 1); None for all."""
        if mask is None:
            return None
        parts = read_mask(mask, causal=False)
        if parts.causal:
            raise MaskError(f"{mask!r} is causal. {NOT_CAUSAL}")
        if parts.documents is not None:
            raise MaskError(
                f"{parts.documents!r} separates documents, but each projected key of Linformer is a mixture of all "
                "positions: pass each document as a sequence of its own"
            )
        length = source.shape[1]
        if positions is None:
            positions = torch.arange(length, device=source.device)
        check_positions("positions", positions, source.shape[0], length)
        keep = parts.keep_at(positions)
        return None if keep is None else keep.expand(*((1,) * (3 - keep.ndim)), *keep.shape).unsqueeze(-1)

    def make_cache(self, max_length: int | None = None) -> NoReturn:
        """Raise, as a layer that is not causal cannot decode.

        Raises:
            ConfigurationError: always, with the reason.
        """
        raise ConfigurationError(NOT_CAUSAL)

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, as `make_cache` does."""
        raise ConfigurationError(NOT_CAUSAL)

    def observe(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, as the weights are those of mixtures and not of tokens.

        Raises:
            ConfigurationError: always, with the reason.
        """
        raise ConfigurationError(NO_TOKEN_WEIGHTS)

    def observe_step(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, as `make_cache` does."""
        raise ConfigurationError(NOT_CAUSAL)

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""
