"""The formulas of the steps of Titans, TTT-Linear and S4D over the tables before them, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .written_tables import Formula, WrittenTables


def _before(tables: WrittenTables, step: str) -> Tensor:
    """What a table has after the position before: of the first the zeros of its own shape."""
    at = tables.index - 1
    return tables[f"{step}.{at}"] if at else torch.zeros_like(tables.steps[f"{step}.1"].numbers)


def _row(tables: WrittenTables, step: str) -> Tensor:
    """The row of a table for this position, (1, features)."""
    return tables[step][tables.index - 1 : tables.index]


def _model_before(tables: WrittenTables) -> Tensor:
    return tables["initial_model"] if tables.index == 1 else tables[f"model.{tables.index - 1}"]


def _normed(rows: Tensor) -> Tensor:
    return (rows - rows.mean(-1, keepdim=True)) / rows.std(-1, correction=0, keepdim=True)


def _gradient(tables: WrittenTables) -> Tensor:
    error, normed = (tables[f"{step}.{tables.index}"] for step in ("error", "normed"))
    along = (error * normed).mean(-1, keepdim=True)
    deviation = tables[f"product.{tables.index}"].std(-1, correction=0, keepdim=True)
    return (error - error.mean(-1, keepdim=True) - along * normed) / deviation


def _complex(rows: Tensor) -> Tensor:
    """Rows of a real and an imaginary part as complex numbers."""
    return torch.view_as_complex(rows.contiguous())


def _pairs(numbers: Tensor) -> Tensor:
    return torch.view_as_real(numbers.reshape(-1))


def _parameters(tables: WrittenTables) -> Tensor:
    """Δ, A, C and D."""
    return _complex(tables["channel_parameters"])


def _state_factor(tables: WrittenTables) -> Tensor:
    step, rate, *_ = _parameters(tables)
    return _pairs((1 + step * rate / 2) / (1 - step * rate / 2))


def _input_factor(tables: WrittenTables) -> Tensor:
    step, rate, *_ = _parameters(tables)
    return _pairs(step / (1 - step * rate / 2))


def _complex_state(tables: WrittenTables) -> Tensor:
    factor, written = (_complex(tables[step]) for step in ("state_factor", "input_factor"))
    return _pairs(factor * _complex(_before(tables, "state")) + written * _row(tables, "input")[0, 0])


def _outputs(tables: WrittenTables) -> Tensor:
    *_, weight, skip = _parameters(tables)
    states = torch.cat([_complex(tables[f"state.{at + 1}"]) for at in range(len(tables["input"]))])
    return 2 * (weight * states).real.unsqueeze(-1) + skip.real * tables["input"]


def _kernel(tables: WrittenTables) -> Tensor:
    weight = _parameters(tables)[2]
    factor, written = (_complex(tables[step]) for step in ("state_factor", "input_factor"))
    return 2 * (weight * written * factor ** torch.arange(len(tables["input"]))).real.unsqueeze(-1)


def _convolution(tables: WrittenTables) -> Tensor:
    kernel, value = tables["kernel"], tables["input"]
    rows = [(kernel[: at + 1].flip(0) * value[: at + 1]).sum(0) for at in range(len(value))]
    return torch.stack(rows) + _parameters(tables)[3].real * value


def _each_query(tables: WrittenTables, step: str) -> Tensor:
    """Each query times the matrix behind its position."""
    return torch.stack([query @ tables[f"{step}.{at}"] for at, query in enumerate(tables["query"], start=1)])


RECURRENCE_FORMULAS: Mapping[str, Formula] = {
    "memory_error": lambda tables: _row(tables, "key") @ _before(tables, "state") - _row(tables, "value"),
    "memory_step": lambda tables: _before(tables, "step") / 2 - _row(tables, "key").T @ tables[f"error.{tables.index}"],
    "memory_state": lambda tables: _before(tables, "state") / 2 + tables[f"step.{tables.index}"],
    "memory_reading": lambda tables: _each_query(tables, "state"),
    "model_product": lambda tables: _row(tables, "key") @ _model_before(tables),
    "model_normed": lambda tables: _normed(tables[f"product.{tables.index}"]),
    "model_error": lambda tables: _row(tables, "key") + tables[f"normed.{tables.index}"] - _row(tables, "value"),
    "model_gradient": _gradient,
    "model": lambda tables: _model_before(tables) - _row(tables, "key").T @ tables[f"gradient.{tables.index}"],
    "model_products": lambda tables: _each_query(tables, "model"),
    "model_reading": lambda tables: tables["query"] + _normed(tables["model_products"]),
    "state_factor": _state_factor,
    "input_factor": _input_factor,
    "complex_state": _complex_state,
    "outputs": _outputs,
    "kernel": _kernel,
    "convolution": _convolution,
}
"""By the name of the wording whose formula a table has; the numbers of the notes are in them."""
