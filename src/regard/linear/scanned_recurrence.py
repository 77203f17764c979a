"""The recurrence of causal linear attention as one scan over the positions, for graphs whose length may vary.

ONNX has an operator `Scan` for torch's, and executes the formula as it stands, one position after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Body = Callable[..., list[Tensor]]


def scanned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    removal: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs o_t = S_tᵀ q_t of all positions, and the state after the last one; shapes as in `recurrence`."""
    group = query.shape[1] // key.shape[1]
    rows = query.unflatten(1, (key.shape[1], group)).permute(3, 0, 1, 2, 4)  # (N, B, Hk, r, D)
    sequences = {"key": key, "value": value, "decay": decay, "beta": beta, "removal": removal}
    if decay is not None and decay.ndim == 3:
        sequences["decay"] = decay.unsqueeze(-1)  # (B, Hk, N, 1)
    given = {name: tensor for name, tensor in sequences.items() if tensor is not None}
    # What is scanned has the positions in front.
    scanned_over = [rows, *(tensor.movedim(2, 0) for tensor in given.values())]
    final, outputs = _scan(_step(list(given)), [state.clone()], scanned_over)
    return outputs.permute(1, 2, 3, 0, 4).flatten(1, 2), final  # (N, B, Hk, r, Dv) -> (B, H, N, Dv)


def _scan(step: Body, states: list[Tensor], sequences: list[Tensor]) -> Any:
    from torch._higher_order_ops.scan import scan_op  # with which torch loads its compiler

    return scan_op(step, states, sequences, ())


def _step(names: list[str]) -> Body:
    """S_t = e^{g_t} S_{t-1} + k_t u_tᵀ and S_tᵀ q_t of one position, for the given tensors beside the query."""

    def step(state: Tensor, query: Tensor, *tensors: Tensor) -> list[Tensor]:
        at = dict(zip(names, tensors, strict=True))  # (B, Hk, ·)
        key, value = at["key"], at["value"]
        if "decay" in at:
            state = state * at["decay"].exp().unsqueeze(-1)  # (B, Hk, D, Dv)
        if "beta" in at:
            removed = (at.get("removal", key).unsqueeze(-2) @ state).squeeze(-2)
            value = at["beta"].unsqueeze(-1) * (value - removed)
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        return [state, query @ state]

    return step
