"""A whole Transformer block step by step: attention, residual paths, norms, and the feed-forward network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError
from ..nn import Attention, FeedForward, PostNorm, PreNorm, TransformerBlock
from .captured_attention import captured_calls
from .hand_arithmetic import feature_names, named_cell, product_example, telling_cell
from .layer_steps import layer_walkthrough
from .step_table import StepTable, Walkthrough, make_table, relabelled
from .table_formats import number_text
from .walkthrough import TITLE
from .what_if import WhatIf

CROSS = {"en": "Cross-attention", "ko": "크로스 어텐션"}


def transformer_walkthrough(
    block: TransformerBlock,
    x: Tensor,
    memory: Tensor | None = None,
    *,
    words: Sequence[str] | None = None,
    memory_words: Sequence[str] | None = None,
    what_if: WhatIf | None = None,
) -> Walkthrough:
    """norm(x + f(x)) of each sublayer f of a Transformer block as tables: attention, feed-forward, and all between.

    Sublayers run one after the other, as in the block. The sum with what went in is `steps["residual.1"]`, its norm
    `steps["normalized.1"]`, of the first sublayer; of a pre-norm block the norm comes before the sublayer. Keys of
    cross-attention have a prefix: `steps["cross.weights"]`.

    Shapes: x (1, M, dim), memory (1, N, memory dim) of a block with cross-attention; M and N at most 24.

    Args:
        block: a block of `regard.nn.Attention`, `FeedForward` with ReLU, and `PostNorm` or `PreNorm`.
        x: (1, M, dim).
        memory: (1, N, memory dim), the output of an encoder.
        words: names of the M rows of x.
        memory_words: names of the N rows of the memory.
        what_if: a change to the self-attention before its softmax, in all heads.

    Raises:
        ConfigurationError: other parts of a block than these; as `layer_walkthrough`.
        ShapeError: as `layer_walkthrough`, and for a memory that is missing or has no cross-attention.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.1 and 3.3.

    >>> import torch
    >>> from regard.nn import Attention, FeedForward, PostNorm, Projections, TransformerBlock
    >>> from regard.steps import transformer_walkthrough
    >>> attention = Attention(Projections(4, num_heads=1))
    >>> block = TransformerBlock(attention, FeedForward(4, 8), lambda: PostNorm(torch.nn.LayerNorm(4))).eval()
    >>> steps = transformer_walkthrough(block, torch.eye(4)[None])
    >>> torch.allclose(steps["normalized.2"].numbers.float(), block(torch.eye(4)[None])[0], atol=1e-6)
    True
    """
    with torch.no_grad():
        block(x, memory)  # which refuses what does not fit
        names = [f"x{row}" for row in range(1, x.shape[1] + 1)] if words is None else list(words)
        tables: list[StepTable] = []
        for number, (residual, compute) in enumerate(_sublayers(block, memory, names, memory_words, what_if), start=1):
            if not isinstance(residual, PostNorm | PreNorm):
                raise ConfigurationError(
                    f"block has a {type(residual).__name__}; its steps are known of PostNorm and PreNorm"
                )
            inner = residual.before(x)
            steps, branch = compute(inner)
            total, after = x + branch, residual.after(x, branch)
            before = isinstance(residual, PreNorm)
            source, result = (x, inner) if before else (total, after)
            norm = _norm_table(residual.norm, source, result, names, number)
            sums = make_table(f"residual.{number}", total[0], names, wording="residual", example=_sum(x, branch, total))
            tables += [norm, *steps, sums] if before else [*steps, sums, norm]
            x = after
    return Walkthrough(TITLE, tuple(tables))


Compute = Callable[[Tensor], tuple[list[StepTable], Tensor]]


def _sublayers(
    block: TransformerBlock,
    memory: Tensor | None,
    words: list[str],
    memory_words: Sequence[str] | None,
    what_if: WhatIf | None,
) -> Iterator[tuple[nn.Module, Compute]]:
    """The residual connection of each sublayer, and the function that computes its tables and its output."""
    yield block.attention_residual, lambda h: _attention(block.attention, h, queries=words, keys=words, what_if=what_if)
    cross = block.cross_attention
    if cross is not None and block.cross_residual is not None:
        yield block.cross_residual, lambda h: _cross_attention(cross, h, memory, queries=words, keys=memory_words)
    yield block.feed_forward_residual, lambda h: _feed_forward(block.feed_forward, h, words)


def _attention(
    layer: object, x: Tensor, memory: Tensor | None = None, **options: Any
) -> tuple[list[StepTable], Tensor]:
    """The tables of attention by `layer_walkthrough`, and its output (1, M, dim)."""
    steps = layer_walkthrough(layer, x, memory, **options)  # type: ignore[arg-type]  # which checks it
    return list(steps.tables), steps["output"].numbers.to(x)[None]


def _cross_attention(
    layer: Attention, x: Tensor, memory: Tensor | None, **options: Any
) -> tuple[list[StepTable], Tensor]:
    """As `_attention`, under keys with the prefix `cross.`."""
    tables, output = _attention(layer, x, memory, **options)
    return [relabelled(table, "cross.", CROSS) for table in tables], output


def _feed_forward(network: nn.Module, x: Tensor, words: list[str]) -> tuple[list[StepTable], Tensor]:
    """The matrices, the hidden features and the output (1, M, dim) of a feed-forward network."""
    if not isinstance(network, FeedForward) or network.activation is not functional.relu:
        raise ConfigurationError(
            "block has another feed-forward network than regard.nn.FeedForward with ReLU, of which the steps are known"
        )
    with captured_calls(up=network.up, down=network.down) as calls:
        output = network(x)
    hidden = calls["down"][0][0]
    first, cell = _product(network.up, x[0], calls["up"][1][0], words)
    first += f"; max(0, …) = {_text(hidden[0][cell])}" if first else ""
    last, _ = _product(network.down, hidden[0], output[0], words)
    tables = [
        *_weights("up", network.up),
        make_table("hidden", hidden[0], words, example=first),
        *_weights("down", network.down),
        make_table("feed_forward", output[0], words, example=last),
    ]
    return tables, output


def _weights(name: str, linear: nn.Linear) -> Iterator[StepTable]:
    """The matrix that rows are multiplied by from the right, and the bias if there is one."""
    yield make_table(f"{name}_projection", linear.weight.T, [str(row) for row in range(1, linear.in_features + 1)])
    if linear.bias is not None:
        yield make_table(f"{name}_bias", linear.bias, ["b"])


def _product(linear: nn.Linear, x: Tensor, result: Tensor, words: list[str]) -> tuple[str, tuple[int, int]]:
    """One number of a layer without bias written out, of those with the most terms, and its row and column."""
    row, column = cell = telling_cell(x.unsqueeze(1) * linear.weight)
    if linear.bias is not None:
        return "", cell
    example = product_example(x[row], linear.weight[column], result[cell])
    return named_cell(example, cell, words, feature_names(result)), cell


def _norm_table(norm: nn.Module, source: Tensor, result: Tensor, words: list[str], number: int) -> StepTable:
    """The rows after a norm; of a LayerNorm without learned numbers with the arithmetic of the first."""
    row, example = source[0, 0], ""
    if isinstance(norm, nn.LayerNorm) and bool((norm.weight == 1).all()) and not bool(norm.bias.any()):
        first, mean, deviation = (_text(value) for value in (row[0], row.mean(), row.std(correction=0)))
        example = f"({first} - {mean}) / {deviation} = {_text(result[0, 0, 0])}"
    return make_table(f"normalized.{number}", result[0], words, wording="normalized", example=example)


def _sum(x: Tensor, branch: Tensor, total: Tensor) -> str:
    added = _text(branch[0, 0, 0])
    return f"{_text(x[0, 0, 0])} + {f'({added})' if added.startswith('-') else added} = {_text(total[0, 0, 0])}"


def _text(number: Tensor) -> str:
    return number_text(float(number), 3)
