"""Indexers of sparse latent attention: a small attention that chooses the keys of the large one, or an earlier one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, ShapeError, nearest
from ..masks import Mask
from ..positions import Rotary, Rotation
from ..positions.rotary import LAYOUTS, Layout
from ..selection import lightning_indices
from ..utils.numbers import whole_number
from .key_selection import KeySelection
from .linear import Linear
from .projections import init_xavier


class LightningIndexer(nn.Module):
    """The `count` keys s of the largest I(t, s) = Σ_h w_th · relu(q_th · k_s) of each token t, of those that exist.

    q_th = Y_t W_Q of the latent Y of the queries, k_s = norm(X_s W_K) of the input, both with rotary positions;
    w_t = X_t W_W / √(num_heads · head_dim). One key for all heads is cached: head_dim numbers a position.

    No gradient reaches the parameters through the choice: the indexer learns from a loss of its own.

    Args:
        dim: of the input.
        query_latent_dim: of Y.
        num_heads: heads of the indexer.
        head_dim: of each q and of k; the first features are rotated, by the rotation of the layer.
        count: how many keys are chosen.
        layout: of the rotated features, as of `regard.positions.Rotary`; DeepSeek-V3.2's is "half", where that of the
            attention itself is "interleaved".

    Raises:
        ConfigurationError: a number below 1, an unknown layout.

    Source: DeepSeek-V3.2-Exp (2025), Eq. 1 and 2, and the code released with it, without its rounding to 8 bits.

    >>> indexer = LightningIndexer(dim=8, query_latent_dim=6, num_heads=2, head_dim=4, count=2)
    >>> x, latent = torch.randn(1, 3, 8), torch.randn(1, 3, 6)
    >>> indexer(x, latent, indexer.keys(x, None), None).shape
    torch.Size([1, 3, 2])
    """

    def __init__(
        self,
        dim: int,
        query_latent_dim: int,
        *,
        num_heads: int,
        head_dim: int,
        count: int,
        layout: Layout = "half",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = whole_number("num_heads", num_heads), whole_number("head_dim", head_dim)
        self.count, self.layout = whole_number("count", count), layout
        if layout not in LAYOUTS:
            raise ConfigurationError(f"an indexer has no layout {layout!r}; {nearest(str(layout), LAYOUTS)}")
        self.query = Linear(query_latent_dim, num_heads * head_dim, bias=False)
        self.key = Linear(dim, head_dim, bias=False)
        self.key_norm = nn.LayerNorm(head_dim, eps=1e-6)
        self.weights = Linear(dim, num_heads, bias=False)
        for linear in (self.query, self.key, self.weights):
            init_xavier(linear)

    def check_layer(self, query_latent_dim: int, rotary: Rotary | None) -> None:
        """Check that the indexer fits the latents of a layer's queries, and its rotary.

        Raises:
            ConfigurationError: it does not.
        """
        if self.query.in_features != query_latent_dim:
            raise ConfigurationError(
                f"the indexer has query_latent_dim={self.query.in_features}, but queries are projected from vectors of "
                f"{query_latent_dim}: make it with query_latent_dim={query_latent_dim}"
            )
        if rotary is not None and rotary.dim > self.head_dim:
            raise ConfigurationError(
                f"rotary turns {rotary.dim} features, but the indexer has head_dim={self.head_dim}: make it with a "
                f"head_dim of {rotary.dim} or more"
            )

    def keys(self, inputs: Tensor, rotation: Rotation | None) -> Tensor:
        """The keys k, (batch, length, dim) to (batch, 1, length, head_dim), as a cache of keys and values has them."""
        with torch.no_grad():
            return self._rotated(self.key_norm(self.key(inputs)).unsqueeze(1), rotation)

    def forward(
        self,
        inputs: Tensor,
        latent: Tensor,
        keys: Tensor,
        rotation: Rotation | None,
        *,
        mask: Mask | None = None,
        query_positions: Tensor | range | None = None,
        key_positions: Tensor | range | None = None,
        selection: KeySelection | None = None,
    ) -> Tensor:
        """The columns of the chosen keys, (batch, M, at most count); -1 where fewer exist.

        Args:
            inputs: (batch, M, dim), of the queries' tokens.
            latent: (batch, M, query_latent_dim), Y of these.
            keys: (batch, 1, N, head_dim), of all tokens.
            rotation: of the queries' tokens.
            mask: which keys exist, the same for all heads; causal, by columns, without one.
            query_positions: of the M tokens, for the mask, as in `regard.attention`.
            key_positions: of the N tokens, likewise.
            selection: is given the columns, for later layers.
        """
        with torch.no_grad():
            heads = self.query(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            weights = self.weights(inputs) * (self.num_heads * self.head_dim) ** -0.5
            columns = lightning_indices(
                self._rotated(heads, rotation),
                keys.squeeze(1),
                weights,
                count=self.count,
                mask=mask,
                query_positions=query_positions,
                key_positions=key_positions,
            )
        if selection is not None:
            selection.columns = columns
        return columns

    def _rotated(self, heads: Tensor, rotation: Rotation | None) -> Tensor:
        return heads if rotation is None else replace(rotation, layout=self.layout).rotate(heads)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, count={self.count}"


class EarlierIndexer(nn.Module):
    """The keys that the indexer of an earlier layer has chosen, for the same tokens and keys: no parameters, no keys.

    Source: GLM-MoE-DSA of transformers, whose layers of the type "shared" have no indexer (arXiv 2603.12201).
    """

    def check_layer(self, query_latent_dim: int, rotary: Rotary | None) -> None:
        """Nothing has to fit."""

    def keys(self, inputs: Tensor, rotation: Rotation | None) -> Tensor:
        """Nothing to cache: (batch, length, dim) to (batch, 1, length, 0)."""
        return inputs.unsqueeze(1)[..., :0]

    def forward(
        self,
        inputs: Tensor,
        latent: Tensor,
        keys: Tensor,
        rotation: Rotation | None,
        *,
        selection: KeySelection | None = None,
        **mask: object,
    ) -> Tensor:
        """The columns of the selection; the other arguments, of `LightningIndexer.forward`, have been applied there.

        Raises:
            ConfigurationError: there is no selection, or nothing has been chosen yet, or for other tokens.
        """
        columns = None if selection is None else selection.columns
        if columns is None:
            raise ConfigurationError(
                "the layer attends to the keys that an earlier layer has chosen, and there are none: give both calls "
                "the same selection=KeySelection(), that of the layer with a LightningIndexer first"
            )
        if columns.shape[:2] != inputs.shape[:2]:
            raise ShapeError(
                f"the selection is of (batch, length) {tuple(columns.shape[:2])}, but the layer has tokens "
                f"{tuple(inputs.shape[:2])}: give each call of the layer with the indexer a new KeySelection()"
            )
        return columns
