"""Performer's attention: linear attention by random features, whose rows are a buffer of the layer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..linear import FavorPlus
from ..positions import Rotary
from .layer_arguments import check_parts_of_layer
from .linear_attention_layer import LinearAttention
from .projections import Projections


class PerformerAttention(LinearAttention):
    """Linear attention by positive orthogonal random features, whose mean is that of softmax attention (FAVOR+).

    The random rows are a buffer, saved and loaded with the parameters. `redraw` draws others, as is done from time to
    time in training, so that the model does not fit itself to one draw.

    Args:
        projections: dims, heads and the linear maps.
        num_features: of each query and key; the error falls as 1/√num_features.
        kernel: "softmax", or "relu" for ReLU features.
        causal: whether a token attends to itself and those before it alone.
        seed: of the first random rows; drawn from torch's default generator where it is None.
        rotary: rotary position embedding of queries and keys.

    Raises:
        ConfigurationError: an argument out of range.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), section 2.

    >>> import torch, regard
    >>> layer = regard.nn.PerformerAttention(regard.nn.Projections(16, num_heads=4), num_features=32)
    >>> layer(torch.randn(2, 7, 16)).shape, layer.matrix.shape
    (torch.Size([2, 7, 16]), torch.Size([32, 4]))
    """

    matrix: Tensor

    def __init__(
        self,
        projections: Projections,
        *,
        num_features: int = 256,
        kernel: str = "softmax",
        causal: bool = False,
        seed: int | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        check_parts_of_layer(projections, None)
        features = FavorPlus(projections.head_dim, num_features, seed, kernel)
        super().__init__(projections, feature_map=features, causal=causal, rotary=rotary)
        self.register_buffer("matrix", features.matrix.to(projections.query.weight.dtype))

    @property
    def feature_map(self) -> FavorPlus:
        """The map of the rows in the buffer."""
        return replace(self._feature_map, matrix=self.matrix)  # type: ignore[type-var]

    def redraw(self, seed: int | None = None) -> None:
        """Draw other random rows, by this seed or one from torch's default generator; caches keep their own."""
        self.matrix = self.feature_map.redraw(seed).matrix.to(self.matrix)
