"""One token of the linear recurrence in one launch: its output, and the state after it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.recurrence_problem import FeatureMapName
from . import jit_runtime
from .decayed_chunk import SMALLEST_DECAY, TINY, at_head
from .score_tile import rounded

STEP_MAPS = ("identity", "elu", "unit_norm")
"""The feature maps that the kernel has; it knows them by their place."""
MOST_DIM, MOST_ENTRIES = 1024, 2**14
"""Features that a program holds, and entries of a state at once."""


@triton.jit
def load_token(ROWS, D: tl.constexpr, BD: tl.constexpr, scale, MAP: tl.constexpr):
    """φ(scale · x) of the one row of a head, (BD,), float32; 0 beyond D."""
    number = tl.arange(0, BD)
    x = tl.load(ROWS[0] + number, mask=number < D, other=0.0).to(tl.float32) * scale
    if MAP == 1:
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == 2:
        x = x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-12)
    return tl.where(number < D, x, 0.0)


@triton.jit
def one_token(
    Q, K, V, DECAY, BETA, STATE, TARGET, OUTPUT, key_heads, group, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    MAP: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The token of one key head, in blocks of BV values: all of them by one program where there is a total.

    A state is its matrix, row by row, and then the total. What a program reads it alone writes, so TARGET may be STATE.
    """
    head, feature = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, BD)
    batch, number, width = head // key_heads, head % key_heads, D * DV + (D if NORMALIZE else 0)
    k = load_token(at_head(K, batch, number), D, BD, 1.0, MAP)
    factor = tl.full((BD,), 1.0, tl.float32)
    if DECAY is not None:
        decay_at = at_head(DECAY, batch, number)[0] + (feature if PER_FEATURE else feature * 0)
        factor = tl.exp(tl.maximum(tl.load(decay_at, mask=feature < D, other=0.0).to(tl.float32), SMALLEST_DECAY))
    STATE, TARGET = STATE + head * width, TARGET + head * width
    if NORMALIZE:
        total = tl.load(STATE + D * DV + feature, mask=feature < D, other=0.0) * factor + k
    for block in range(tl.program_id(1), tl.cdiv(DV, BV), tl.num_programs(1)):
        column = block * BV + tl.arange(0, BV)
        at, inside = feature[:, None] * DV + column[None, :], (feature < D)[:, None] & (column < DV)[None, :]
        state = tl.load(STATE + at, mask=inside, other=0.0) * factor[:, None]
        u = tl.load(at_head(V, batch, number)[0] + column, mask=column < DV, other=0.0).to(tl.float32)
        if BETA is not None:
            beta = tl.load(at_head(BETA, batch, number)[0]).to(tl.float32)
            u = beta * (u - tl.sum(k[:, None] * state, 0))
        state += k[:, None] * u[None, :]
        tl.store(TARGET + at, state, mask=inside)
        for member in range(group):
            q = load_token(at_head(Q, batch, number * group + member), D, BD, scale, MAP)
            output = tl.sum(q[:, None] * state, 0)
            if NORMALIZE:
                row_total = tl.sum(q * total, 0)
                output = output / tl.where(tl.abs(row_total) >= TINY, row_total, float("inf"))
            output_at = OUTPUT + (head * group + member) * DV + column
            tl.store(output_at, rounded(output, OUTPUT.dtype.element_ty), mask=column < DV)
    if NORMALIZE:
        tl.store(TARGET + D * DV + feature, total, mask=feature < D)


class TokenStepInTriton:
    """The recurrence of one token for tensors of one layout on one device: `prepare_step` makes it.

    A state is read and written with each token: no state lacks tokens, and `recent_capacity` is 0.

    Shapes: query (B, H, 1, D), key (B, Hk, 1, D), value (B, Hk, 1, Dv).
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        layouts, device, feature_map, normalize, scale = arguments
        query, key, value, decay, _ = layouts
        (batch, heads, _, self.dim), self.value_dim = query[0], value[0][3]
        key_heads = key[0][1]
        self._layouts, self._device = layouts, torch.device(device)
        self.feature_map: FeatureMapName = feature_map
        self.normalize, self.scale = normalize, scale
        self.state_shape = torch.Size((batch, key_heads, self.dim * (self.value_dim + normalize)))
        self.decay_dim = 0 if decay is None else 1 if len(decay[0]) == 3 else self.dim
        self.recent_width, self.recent_capacity = self.dim + self.value_dim + self.decay_dim, 0
        self._output_shape = torch.Size((batch, heads, 1, self.value_dim))
        features = max(16, triton.next_power_of_2(self.dim))
        values = min(max(16, MOST_ENTRIES // features), 64, max(16, triton.next_power_of_2(self.value_dim)))
        self._grid = batch * key_heads, 1 if normalize else triton.cdiv(self.value_dim, values)
        self._options = {
            "key_heads": key_heads,
            "group": heads // max(key_heads, 1),
            "scale": scale,
            "D": self.dim,
            "DV": self.value_dim,
            "BD": features,
            "BV": values,
            "PER_FEATURE": decay is not None and len(decay[0]) == 4,
            "MAP": STEP_MAPS.index(feature_map),
            "NORMALIZE": normalize,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStepInTriton, self._arguments

    def takes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        removal: Tensor | None = None,
    ) -> bool:
        """Whether tensors are on the device and have the layout; of what it has no gate of, there has to be none."""
        if removal is not None:
            return False
        found = layouts_of(query, key, value, decay, beta)
        devices = (tensor.device for tensor in (query, key, value, decay, beta) if tensor is not None)
        return found == self._layouts and all(device == self._device for device in devices)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        recent: Tensor | None = None,
        recent_count: int = 0,
        target: Tensor | None = None,
        removal: Tensor | None = None,
    ) -> Tensor:
        """The output; `target`, perhaps the same memory as the state, gets the new state.

        Nothing is checked: the caller knows that it `takes` the tensors. There are no recent tokens, and no removal.
        """
        output = query.new_empty(self._output_shape)
        launch: Any = one_token[self._grid]
        with torch.cuda.device_of(query):
            launch(
                *(_first_row(tensor) for tensor in (query, key, value, decay, beta)),
                *(state, state if target is None else target, output),
                **self._options,
                num_warps=4,
            )
        return output

    def in_one_call(self) -> bool:
        """A launch fails before anything is written, or not at all."""
        return True


def layouts_of(*tensors: Tensor | None) -> tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]:
    """The shape, the strides and the dtype of each tensor."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors)


def prepare_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    removal: Tensor | None = None,
    *,
    feature_map: FeatureMapName = "identity",
    normalize: bool = False,
    scale: float = 1.0,
    recent_share: float = 0.0,
) -> TokenStepInTriton | None:
    """The step for tensors of these layouts, as the protocol has it; None where there is no code for them."""
    tensors = [tensor for tensor in (query, key, value, decay, beta) if tensor is not None]
    if removal is not None or not (query.dtype is key.dtype is value.dtype and jit_runtime.runs(*tensors)):
        return None
    if any(tensor.device != query.device for tensor in tensors):
        return None
    layouts = layouts_of(query, key, value, decay, beta)
    return _prepare(layouts, str(query.device), feature_map, normalize, scale)


@lru_cache(maxsize=256)  # the same shapes come at every step
def _prepare(layouts: Any, device: str, *options: Any) -> TokenStepInTriton | None:
    """The step for layouts; None where there is none."""
    shapes: list[Any] = [None if layout is None else layout[0] for layout in layouts]
    return TokenStepInTriton(layouts, device, *options) if _fits(*shapes) else None


def _fits(
    query: torch.Size, key: torch.Size, value: torch.Size, decay: torch.Size | None, beta: torch.Size | None
) -> bool:
    """Whether these are shapes of the arguments of `prepare_step`."""
    if not len(query) == len(key) == len(value) == 4:
        return False
    leading, dim = key[:3], key[3]
    return (
        query[2] == key[2] == 1
        and (query[0], query[3]) == (key[0], dim)
        and value[:3] == leading
        and query[1] % max(key[1], 1) == 0
        and 0 < dim <= MOST_DIM
        and value[3] > 0
        and (decay is None or (decay[0] in (1, key[0]) and decay[1:] in (leading[1:], key[1:])))
        and (beta is None or beta == leading)
    )


def _first_row(tensor: Tensor | None) -> tuple[Tensor, int, int, int] | None:
    """A tensor (B or 1, heads, 1, ...) as the kernel takes it; a batch of 1 serves all."""
    if tensor is None:
        return None
    return tensor, tensor.stride(0) if tensor.shape[0] > 1 else 0, tensor.stride(1), 0
