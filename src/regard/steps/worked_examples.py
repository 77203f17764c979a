"""Worked examples with small whole numbers, one for each mechanism, that can be followed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from .. import biases, linear, masks, normalizers, scores
from ..approximations import SegmentMeans
from ..attention import observe
from ..biases.gaussian import Gaussian
from ..core.normalizer import Normalizer
from ..errors import ConfigurationError, nearest
from ..lenses import Weights
from ..linear.linear_arguments import LinearOptions
from ..models import recurrent
from ..models.recurrent.decoders import TanhReadout
from ..models.recurrent.encoder import make_cell, run
from ..models.recurrent.recurrent_state import Encoded
from ..nn import Attention, FeedForward, KVCache, LengthProjection, PostNorm, Projections, TransformerBlock
from ..positions import Rotation
from .approximation_steps import favor_walkthrough, mixture_walkthrough, state_tables, state_walkthrough
from .block_steps import merge_walkthrough, online_walkthrough
from .example_notes import NOTES
from .fresh_numbers import FreshNumbers
from .hand_arithmetic import product_example
from .landmark_steps import soft_walkthrough
from .layer_steps import layer_walkthrough, linear_walkthrough
from .sample_steps import lara_walkthrough
from .state_space_steps import StateSpaceChannel, state_space_walkthrough
from .step_table import Walkthrough, make_table, numbered
from .table_formats import number_text
from .trained_memory_steps import MemoryRates, titans_walkthrough, ttt_walkthrough
from .transformer_steps import transformer_walkthrough
from .translation_steps import BAHDANAU_STEPS, LUONG_STEPS
from .walkthrough import walkthrough
from .what_if import CHANGES, ChangeKind, WhatIf
from .wording import STEPS, Wording

STATE = ((1.0, 0.0),)
ANNOTATIONS = ((1.0, 1.0), (0.0, 1.0), (2.0, 0.0))
LONGER_ANNOTATIONS = ((1.0, 1.0), (3.0, 0.0), (2.0, 1.0), (1.0, 2.0))
QUERIES = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
KEYS = ((1.0, 0.0), (0.0, 2.0), (1.0, 1.0))
VALUES = ((1.0, 0.0), (0.0, 2.0), (3.0, 1.0))
SOURCE = ("나는", "학생", "이다")
TARGET = ("I", "am", "student")
LONGER_SOURCE = ("나는", "어제", "학교에", "갔다")
SENTENCE = ((1.0, 0.0, 1.0, 0.0), (0.0, 2.0, 0.0, 1.0), (1.0, 1.0, 0.0, 0.0))
WORDS = ("the", "cat", "sat")
PARTS_OF_SPEECH = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0))
"""Features of "the cat sat": article, noun, verb, past tense."""

TURNED_POSITIONS = ((0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, -1.0))
"""Sine and cosine of 0, 90 and 180 degrees, in the last two features."""

Rows = Sequence[Sequence[float]]
Module = TypeVar("Module", bound=nn.Module)
Make: TypeAlias = Callable[..., Walkthrough]


@dataclass(frozen=True)
class WorkedExample:
    """A named example: its title, the function that computes its tables, and which kinds of changes it takes."""

    title: Wording
    make: Make
    changes: tuple[ChangeKind, ...] = CHANGES


TITLES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The title of each example by language; in a file, so that a command lists them without loading torch."""

EXAMPLES: dict[str, WorkedExample] = {}
"""The worked examples by name, in the order in which the mechanisms were published."""


def worked_example(name: str, what_if: WhatIf | None = None) -> Walkthrough:
    """The tables of a worked example of `EXAMPLES`, under its title and note, with a change where one is given.

    Raises:
        ConfigurationError: there is no example of that name, and the message lists those that there are; or it does not
            take such a change.

    >>> from regard.steps import worked_example
    >>> print(worked_example("luong-dot")["scores"])
    1. Attention scores    e_ij = q_i · k_j
          나는  학생  이다
      s1     1     0     2
      by hand: 1 · 1 + 0 · 1 = 1
    """
    if name not in EXAMPLES:
        raise ConfigurationError(f"there is no worked example {name!r}; {nearest(str(name), EXAMPLES)}")
    example = EXAMPLES[name]
    if what_if is not None and (wrong := [kind for kind in what_if.kinds if kind not in example.changes]):
        takes = ", ".join(example.changes) or "no change"
        raise ConfigurationError(f"the worked example {name!r} has no {wrong[0]} to change; it takes {takes}")
    return replace(example.make(what_if), title=example.title, note=NOTES.get(name))


def _example(name: str, changes: tuple[ChangeKind, ...] = CHANGES) -> Callable[[Make], Make]:
    """Register a function as the example of that name, which takes such changes."""

    def register(make: Make) -> Make:
        EXAMPLES[name] = WorkedExample(Wording(**TITLES[name]), make, changes)
        return make

    return register


def _matrix(rows: Sequence[Any]) -> Tensor:
    """An input of an example: the tensor of these rows, or what `FreshNumbers` draws in their place."""
    fresh = FreshNumbers.active()
    return torch.tensor(rows) if fresh is None else fresh.in_place_of(torch.tensor(rows))


def _fill(module: Module, **matrices: Sequence[Sequence[float]] | Sequence[float]) -> Module:
    """The module with these weights, and with 0 for its other parameters."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.tensor(matrices.get(name, 0.0)))
    return module


def _decoder_step(score: scores.Score, what_if: WhatIf | None) -> Walkthrough:
    """One decoder state over the annotations of a source of three words."""
    state, annotations = _matrix(STATE), _matrix(ANNOTATIONS)
    return walkthrough(state, annotations, annotations, score=score, queries=["s1"], keys=SOURCE, what_if=what_if)


def _whole_layer(
    heads: int, query: Rows, key: Rows, value: Rows, output: Rows, *, key_heads: int | None = None
) -> Attention:
    """A layer of attention with these matrices, by which rows of its input are multiplied from the right."""
    projections = Projections(
        len(query),
        heads,
        num_kv_heads=key_heads,
        head_dim=len(query[0]) // heads,
        value_dim=len(output) // heads,
        memory_dim=None if len(key) == len(query) else len(key),
        bias=False,
    )
    for name, rows in (("query", query), ("key", key), ("value", value), ("output", output)):
        _fill(getattr(projections, name), weight=torch.tensor(rows).T.tolist())
    return Attention(projections).eval()


def _six_words(mask: masks.Mask, bias: biases.Bias | None = None, *, what_if: WhatIf | None) -> Walkthrough:
    """Six positions under a mask, of which the last three have the numbers of the first three."""
    query, key, value = (_matrix(2 * rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(query, key, value, score=scores.Dot(), mask=mask, bias=bias, what_if=what_if)


def _after_luong(attention: Walkthrough) -> Walkthrough:
    """The steps of attention, then Luong's concatenation, attentional vector and prediction."""
    state, context = _matrix(STATE), attention["context"].numbers.float()
    readout = TanhReadout(2, 2)
    weight = _fill(readout.project, weight=[[1, 0, 0, 1], [0, 1, 1, -1]]).weight
    output = _fill(nn.Linear(2, 3, bias=False), weight=[[1, -1], [1, 1], [-1, 1]])
    joined = torch.cat([context, state], -1)
    with torch.no_grad():
        attentional = readout(context, state)
        probabilities = output(attentional).softmax(-1)
        total = readout.project(joined)[0, 0]
    example = f"{product_example(weight[0], joined[0], total)}; tanh of it = {number_text(float(attentional[0, 0]), 3)}"
    tables = [
        make_table("concatenated", joined, ["[c1; s1]"]),
        make_table("attentional_projection", weight, ["1", "2"]),
        make_table("attentional", attentional, ["s̃1"], example=example),
        make_table("prediction_projection", output.weight, TARGET),
        make_table("prediction", probabilities, ["P(y1)"], TARGET),
    ]
    return replace(attention, tables=numbered([*attention.tables, *tables], LUONG_STEPS))


def _after_bahdanau(attention: Walkthrough) -> Walkthrough:
    """The steps of attention with s_{t-1}, then the input of the cell and s_t, of a GRU whose gates are both 1/2."""
    state, context = _matrix(STATE), attention["context"].numbers.float()
    word, candidate = torch.tensor([[0.0, 1.0]]), [[1, 0, 1, 0], [0, 1, 0, -1]]
    cell = _fill(make_cell("gru", 4, 2), weight_ih_l0=[[0] * 4] * 4 + candidate)
    joined = torch.cat([word, context], -1)
    with torch.no_grad():
        after, _ = run(cell, joined[None], (state[None],))
    first_row = torch.tensor(candidate[0])
    total = joined[0] @ first_row.float()
    half, end = number_text(0.5, 3), number_text(float(after[0, 0, 0]), 3)
    product = product_example(first_row, joined[0], total)
    example = f"{product}; {half} · tanh of it + {half} · 1 = {end}"
    tables = [
        make_table("target_embedding", word, ["y1"]),
        make_table("cell_input", joined, ["[y1; c2]"]),
        make_table("cell_projection", torch.tensor(candidate), ["1", "2"]),
        make_table("next_state", after[0], ["s2"], example=example),
    ]
    return replace(attention, tables=numbered([*attention.tables, *tables], BAHDANAU_STEPS))


def _local_step(window: recurrent.MonotonicWindow | recurrent.PredictiveWindow, what_if: WhatIf | None) -> Walkthrough:
    """One decoder state, at target step 2, over the window of a source of four words."""
    state, annotations = _matrix((STATE,)), _matrix((LONGER_ANNOTATIONS,))
    encoded = Encoded(annotations, torch.tensor([len(LONGER_SOURCE)]), annotations[:, -1])
    memory = recurrent.RecurrentMemory(encoded, annotations)
    with torch.no_grad():
        mask, bias = window(state, 2, memory)
    steps = walkthrough(
        state,
        annotations,
        annotations,
        score=scores.Dot(),
        mask=mask,
        bias=bias,
        queries=["s2"],
        keys=LONGER_SOURCE,
        what_if=what_if,
    )
    if not (isinstance(window, recurrent.PredictiveWindow) and isinstance(bias, Gaussian)):
        return steps
    weights = [
        make_table("centre_projection", window.hidden.weight, ["1", "2"]),
        make_table("centre_vector", window.centre.weight, ["v_p"]),
        make_table("centre", bias.center, ["s2"], example="4 · sigmoid(0) = 2"),
    ]
    return replace(steps, tables=(*steps.tables[:3], *weights, *steps.tables[3:]))


@_example("bahdanau")
def _bahdanau(what_if: WhatIf | None = None) -> Walkthrough:
    score = scores.Additive(2, 2, 2)
    _fill(score, query_weight=[[1, 0], [0, 1]], key_weight=[[1, 0], [1, -1]], weight=[1, 2])
    return _after_bahdanau(_decoder_step(score, what_if=what_if))


@_example("coverage", ("flip", "add"))
def _coverage(what_if: WhatIf | None = None) -> Walkthrough:
    score = scores.Additive(2, 2, 2)
    _fill(score, query_weight=[[1, 0], [0, 1]], key_weight=[[1, 0], [1, -1]], weight=[1, 2])
    covered = _fill(recurrent.Covered(score), weight=[-1, -2])
    state, annotations = _matrix(STATE), _matrix(ANNOTATIONS)
    before = walkthrough(state, annotations, annotations, score=score)["weights"].numbers.float()  # of the first step
    with torch.no_grad():
        source = annotations[None]
        encoded = Encoded(source, torch.tensor([len(SOURCE)]), source[:, -1])
        term = covered(score, state[None], recurrent.RecurrentMemory(encoded, score.project_key(source)), before)[0]
    steps = walkthrough(
        state, annotations, annotations, score=score, bias=term, queries=["s2"], keys=SOURCE, what_if=what_if
    )
    coverage = make_table("coverage", before, ["c2"], SOURCE)
    at = steps.keys.index("bias")
    return replace(steps, tables=(*steps.tables[:at], coverage, *steps.tables[at:]))


@_example("luong-dot")
def _luong_dot(what_if: WhatIf | None = None) -> Walkthrough:
    return _after_luong(_decoder_step(scores.Dot(), what_if=what_if))


@_example("luong-general")
def _luong_general(what_if: WhatIf | None = None) -> Walkthrough:
    return _decoder_step(_fill(scores.General(2, 2), weight=[[1, 1], [0, 2]]), what_if=what_if)


@_example("luong-concat")
def _luong_concat(what_if: WhatIf | None = None) -> Walkthrough:
    return _decoder_step(
        _fill(scores.Concat(2, 2, 2), matrix=[[1, 0, 1, 0], [0, 1, 0, -1]], weight=[2, 1]), what_if=what_if
    )


@_example("luong-location", ("flip", "add"))
def _luong_location(what_if: WhatIf | None = None) -> Walkthrough:
    return _decoder_step(_fill(scores.Location(2, 3), weight=[[2, 0], [1, 1], [0, 3]]), what_if=what_if)


@_example("local-m")
def _local_m(what_if: WhatIf | None = None) -> Walkthrough:
    return _local_step(recurrent.MonotonicWindow(radius=1), what_if=what_if)


@_example("local-p")
def _local_p(what_if: WhatIf | None = None) -> Walkthrough:
    window = recurrent.PredictiveWindow(2, radius=1)
    _fill(window.hidden, weight=[[0, 1], [0, 2]])
    _fill(window.centre, weight=[[1, 1]])
    return _local_step(window, what_if=what_if)


@_example("scaled-dot-product")
def _scaled_dot_product(what_if: WhatIf | None = None) -> Walkthrough:
    query = _matrix(((2, 0, 0, 0), (1, 1, 1, 1), (0, 2, 0, 2))).float()
    key = _matrix(((1, 0, 0, 1), (0, 1, 0, 1), (1, 1, 2, 0))).float()
    return walkthrough(query, key, _matrix(VALUES), what_if=what_if)


@_example("saturation")
def _saturation(what_if: WhatIf | None = None) -> Walkthrough:
    query = torch.tensor([[2.0, 2.0, 2.0, 2.0]])
    key = _matrix(((1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 1, 0))).float()
    before = walkthrough(query, key, _matrix(VALUES))
    return walkthrough(query, key, _matrix(VALUES), scale=1.0, what_if=what_if).compared(before)


@_example("projections")
def _projections(what_if: WhatIf | None = None) -> Walkthrough:
    query = ((2, 0, 0, 0), (0, 2, 1, 0), (2, 1, 0, 0), (0, 0, 0, 0))
    key = ((0, 2, 0, 0), (2, 0, 0, 0), (0, 0, 2, 0), (0, 0, 0, 2))
    value = ((1, 0), (0, 3), (1, 1), (1, 0))
    layer = _whole_layer(1, query, key, value, ((1, 0, 1, 0), (0, 1, 0, 1)))
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS, what_if=what_if)


@_example("self-attention")
def _self_attention(what_if: WhatIf | None = None) -> Walkthrough:
    words = _matrix(SENTENCE)
    return walkthrough(words, words, words, queries=WORDS, keys=WORDS, what_if=what_if)


@_example("cross-attention")
def _cross_attention(what_if: WhatIf | None = None) -> Walkthrough:
    query = ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0), (0, 1, 0, 0))
    key = ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0))
    layer = _whole_layer(1, query, key, ((1, 0), (0, 3), (1, 1)), ((1, 0, 1, 0), (0, 1, 0, 1)))
    french, english = ((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 1.0)), ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    return layer_walkthrough(
        layer, _matrix((french,)), _matrix((english,)), queries=("le", "chat"), keys=WORDS, what_if=what_if
    )


@_example("multi-head")
def _multi_head(what_if: WhatIf | None = None) -> Walkthrough:
    query = ((2, 0, 0, 1), (0, 1, 2, 0), (2, 0, 2, 0), (0, 0, 0, 0))
    key = ((0, 2, 0, 1), (2, 0, 0, 0), (0, 0, 2, 0), (0, 0, 0, 0))
    value = ((1, 0, 1, 0), (0, 3, 0, 2), (1, 1, 1, 0), (0, 0, 0, 1))
    output = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1), (0, 0, 1, -1))
    layer = _whole_layer(2, query, key, value, output)
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS, what_if=what_if)


@_example("transformer-block")
def _transformer_block(what_if: WhatIf | None = None) -> Walkthrough:
    words, positions = _matrix(PARTS_OF_SPEECH), _matrix(TURNED_POSITIONS)
    query = ((2, 0, 0, 0), (0, 2, 1, 0), (2, 1, 0, 0), (0, 0, 0, 0))
    key = ((0, 2, 0, 0), (2, 0, 0, 0), (0, 0, 2, 0), (0, 0, 0, 2))
    attention = _whole_layer(1, query, key, ((1, 0), (0, 3), (1, 1), (1, 0)), ((1, 0, 1, 0), (0, 1, 0, 1)))
    network = _fill(FeedForward(4, 4, bias=False))
    _fill(network.up, weight=[[-1, 1, 0, 0], [1, 0, 0, 1], [0, 0, -1, 1], [0, 0, 1, 0]])
    _fill(network.down, weight=[[1, 0, -1, 0], [0, 1, 0, 1], [0, 0, 2, 0], [1, -1, 0, 0]])
    block = TransformerBlock(attention, network, lambda: PostNorm(nn.LayerNorm(4))).eval()
    steps = transformer_walkthrough(block, (words + positions)[None], words=WORDS, what_if=what_if)
    tables = [
        make_table("embeddings", words, WORDS),
        make_table("positions", positions, WORDS),
        replace(steps["input"], title=STEPS["positioned"].title, formula=STEPS["positioned"].formula),
    ]
    return replace(steps, tables=(*tables, *steps.tables[1:]))


@_example("causal-mask")
def _causal_mask(what_if: WhatIf | None = None) -> Walkthrough:
    return walkthrough(
        _matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=masks.causal(), what_if=what_if
    )


@_example("padding-mask")
def _padding_mask(what_if: WhatIf | None = None) -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(*tensors, score=scores.Dot(), mask=masks.padding(lengths=[2]), what_if=what_if)


@_example("prefix-mask")
def _prefix_mask(what_if: WhatIf | None = None) -> Walkthrough:
    mask = masks.causal() | masks.prefix(2)
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=mask, what_if=what_if)


@_example("document-mask")
def _document_mask(what_if: WhatIf | None = None) -> Walkthrough:
    mask = masks.causal() & masks.documents([0, 0, 1])
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=mask, what_if=what_if)


@_example("window-mask")
def _window_mask(what_if: WhatIf | None = None) -> Walkthrough:
    mask = masks.causal() & masks.window(before=1)
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=mask, what_if=what_if)


@_example("strided-mask")
def _strided_mask(what_if: WhatIf | None = None) -> Walkthrough:
    return _six_words(masks.causal() & (masks.window(before=1) | masks.strided(3)), what_if=what_if)


@_example("fixed-mask")
def _fixed_mask(what_if: WhatIf | None = None) -> Walkthrough:
    return _six_words(masks.causal() & masks.fixed(3, 1), what_if=what_if)


@_example("dilated-mask")
def _dilated_mask(what_if: WhatIf | None = None) -> Walkthrough:
    return _six_words(masks.dilated(1, 2, after=1), what_if=what_if)


@_example("global-tokens")
def _global_tokens(what_if: WhatIf | None = None) -> Walkthrough:
    return _six_words(masks.window(before=1, after=1) | masks.global_tokens([0]), what_if=what_if)


@_example("absolute-positions")
def _absolute_positions(what_if: WhatIf | None = None) -> Walkthrough:
    words, names = _matrix(((2.0, 0.0), (0.0, 2.0), (2.0, 0.0))), ("the 1", "cat 2", "the 3")
    positions = torch.tensor(((0.0, 1.0), (1.0, 0.0), (0.0, -1.0)))  # sine and cosine of 0, 90 and 180 degrees
    weights = observe(words, words, words, Weights(), score=scores.Dot())[Weights()]
    inputs = words + positions
    steps = walkthrough(inputs, inputs, inputs, score=scores.Dot(), queries=names, keys=names, what_if=what_if)
    tables = [
        make_table("embeddings", words, names),
        make_table("plain_weights", weights, names, names, sums="rows"),
        make_table("positions", positions, names),
        make_table("input", inputs, names, wording="positioned"),
    ]
    return replace(steps, tables=(*tables, *steps.tables))


@_example("alibi")
def _alibi(what_if: WhatIf | None = None) -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    bias = biases.alibi(torch.tensor([1.0]))
    return walkthrough(*tensors, score=scores.Dot(), mask=masks.causal(), bias=bias, what_if=what_if)


@_example("relative-bias")
def _relative_bias(what_if: WhatIf | None = None) -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    bias = biases.clipped(torch.tensor([[-1.0, 0.0, 2.0]]), before=1, after=1)
    return walkthrough(*tensors, score=scores.Dot(), bias=bias, what_if=what_if)


@_example("adaptive-span")
def _adaptive_span(what_if: WhatIf | None = None) -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    bias = biases.adaptive_span(torch.zeros(1), ramp=3.0)
    return walkthrough(*tensors, score=scores.Dot(), bias=bias, what_if=what_if)


@_example("rotary")
def _rotary(what_if: WhatIf | None = None) -> Walkthrough:
    turn = Rotation(torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([[0.0], [1.0], [0.0]]), "interleaved")
    query, key = _matrix(((1.0, 0.0),) * 3), _matrix(((1.0, 0.0), (1.0, 0.0), (2.0, 0.0)))
    steps = walkthrough(turn.rotate(query), turn.rotate(key), _matrix(VALUES), score=scores.Dot(), what_if=what_if)
    names = [("q1", "q2", "q3"), ("k1", "k2", "k3")]
    before = [
        make_table(f"unrotated_{kind}", tensor, rows)
        for kind, tensor, rows in zip(("query", "key"), (query, key), names, strict=True)
    ]
    after = [
        make_table(table.key, table.numbers, table.rows, wording=f"rotated_{table.key}") for table in steps.tables[:2]
    ]
    return replace(steps, tables=(*before, *after, *steps.tables[2:]))


@_example("grouped-query")
def _grouped_query(what_if: WhatIf | None = None) -> Walkthrough:
    query = ((1, 0, 1, -1), (0, 1, 1, 0), (1, 0, 0, 1), (0, -1, 0, 0))
    key, value = ((0, 1), (2, 0), (0, 2), (0, 0)), ((1, 2), (3, 0), (0, 1), (1, 1))
    output = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    layer = _whole_layer(4, query, key, value, output, key_heads=2)
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS, what_if=what_if)


@_example("multi-query")
def _multi_query(what_if: WhatIf | None = None) -> Walkthrough:
    query, key, value = ((1, 0), (0, 1), (1, 0), (0, -1)), ((0,), (2,), (0,), (0,)), ((1,), (3,), (0,), (1,))
    layer = _whole_layer(2, query, key, value, ((1, 0, 1, 0), (0, 1, 0, 1)), key_heads=1)
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS, what_if=what_if)


@_example("cache")
def _cache(what_if: WhatIf | None = None) -> Walkthrough:
    query, key, value = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    with torch.no_grad():
        before = KVCache().append(key[:, :, :2], value[:, :, :2])
        after = before.append(key[:, :, 2:], value[:, :, 2:])
    steps = walkthrough(query[:, :, 2:], after.keys, after.values, score=scores.Dot(), queries=["q3"], what_if=what_if)
    cached = (
        make_table("cached_key", before.keys[0, 0], ["k1", "k2"]),
        make_table("cached_value", before.values[0, 0], ["k1", "k2"]),
    )
    return replace(steps, tables=(*cached, *steps.tables))


@_example("attention-sink")
def _attention_sink(what_if: WhatIf | None = None) -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(*tensors, score=scores.Dot(), sinks=torch.tensor([1.0]), what_if=what_if)


@_example("flash")
def _flash(what_if: WhatIf | None = None) -> Walkthrough:
    key = _matrix(((1.0, 2.0), (0.0, 0.0), (2.0, 0.0), (1.0, 1.0)))
    return online_walkthrough(
        _matrix(((1.0, 0.0), (0.0, 1.0))), key, _matrix((*VALUES, (2.0, 2.0))), width=2, what_if=what_if
    )


def _three_words(normalizer: Normalizer, mask: masks.Mask | None = None, *, what_if: WhatIf | None) -> Walkthrough:
    """Three words and another normalizer than softmax."""
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(*tensors, score=scores.Dot(), mask=mask, normalizer=normalizer, what_if=what_if)


@_example("sparsemax")
def _sparsemax(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.Sparsemax(), what_if=what_if)


@_example("top-scores")
def _top_scores(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.TopScores(2), what_if=what_if)


@_example("softmax1")
def _softmax1(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.Softmax1(), what_if=what_if)


@_example("sigmoid")
def _sigmoid(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.Sigmoid(-1.0), what_if=what_if)


@_example("stick-breaking")
def _stick_breaking(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.StickBreaking(), masks.causal(), what_if=what_if)


@_example("linear-chain")
def _linear_chain(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.LinearChain(torch.eye(2)), what_if=what_if)


@_example("projective-trees")
def _projective_trees(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.ProjectiveTrees(), what_if=what_if)


@_example("dependency-trees")
def _dependency_trees(what_if: WhatIf | None = None) -> Walkthrough:
    return _three_words(normalizers.DependencyTrees(), what_if=what_if)


@_example("chosen-keys")
def _chosen_keys(what_if: WhatIf | None = None) -> Walkthrough:
    return _six_words(masks.chosen(torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [0, 4], [2, 5]])), what_if=what_if)


@_example("landmarks", ())
def _landmarks(_: WhatIf | None = None) -> Walkthrough:
    return _six_words(masks.causal(), biases.landmarks(3), what_if=None)


@_example("linear", ("drop",))
def _linear(what_if: WhatIf | None = None) -> Walkthrough:
    tensors = _matrix(QUERIES), _matrix(KEYS), _matrix(VALUES)
    steps = linear_walkthrough(*tensors, feature_map=linear.Relu(), causal=True, what_if=what_if)
    query, key, value = tensors
    if what_if is not None:  # φ of a key that is masked is 0 in the recurrence
        key = key.index_fill(0, torch.tensor(what_if.drop), 0.0)
    return replace(steps, tables=(*steps.tables, *state_tables(query, key, value, feature_map=linear.Relu())))


@_example("linear-decay", ())
def _linear_decay(_: WhatIf | None = None) -> Walkthrough:
    value = _matrix(((4.0, 0.0), (0.0, 4.0), (2.0, 2.0)))
    decay = torch.full((3,), 0.5).log()
    key, identity = _matrix(((1.0, 0.0),) * 3), linear.Identity()
    return state_walkthrough(key, key, value, feature_map=identity, normalize=False, scale=1.0, decay=decay)


@_example("delta-rule", ())
def _delta_rule(_: WhatIf | None = None) -> Walkthrough:
    key, query = _matrix(((1.0, 0.0), (0.0, 1.0), (1.0, 0.0))), _matrix(((1.0, 0.0), (1.0, 0.0), (1.0, 0.0)))
    options: LinearOptions = {"feature_map": linear.Identity(), "normalize": False, "scale": 1.0, "beta": torch.ones(3)}
    return state_walkthrough(query, key, _matrix(VALUES), **options)


@_example("titans", ())
def _titans(_: WhatIf | None = None) -> Walkthrough:
    key, query = _matrix(((1.0, 0.0), (0.0, 1.0), (1.0, 0.0))), _matrix(((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)))
    value = _matrix(((4.0, 0.0), (0.0, 4.0), (2.0, 2.0)))
    return titans_walkthrough(query, key, value, MemoryRates(rate=1.0, momentum=0.5, kept=0.5))


@_example("ttt-linear", ())
def _ttt_linear(_: WhatIf | None = None) -> Walkthrough:
    """Weights whose rows have the mean 0 and the variance 1: no other numbers take their place."""
    key, value = _matrix(((1.0, 0.0, 0.0, 0.0),) * 2), _matrix(((2.0, 1.0, -1.0, 1.0), (2.0, 2.0, -1.0, 1.0)))
    initial = torch.tensor(
        ((1.0, 1.0, -1.0, -1.0), (1.0, -1.0, 1.0, -1.0), (1.0, -1.0, -1.0, 1.0), (-1.0, 1.0, 1.0, -1.0))
    )
    return ttt_walkthrough(key, key, value, initial)


@_example("s4d", ())
def _s4d(_: WhatIf | None = None) -> Walkthrough:
    """The state is turned by 90 degrees, and halved, in each step."""
    channel = StateSpaceChannel(step=2.0, rate=-0.6 + 0.8j, weight=1.0 + 0.0j, skip=1.0)
    return state_space_walkthrough(_matrix(((4.0,), (0.0,), (0.0,), (1.0,))), channel)


@_example("performer", ("drop",))
def _performer(what_if: WhatIf | None = None) -> Walkthrough:
    features = linear.FavorPlus(1, 2, matrix=torch.tensor([[1.0], [-1.0]]))
    return favor_walkthrough(
        _matrix(((0.0,), (1.0,))), _matrix(((0.0,), (1.0,), (-1.0,))), _matrix(VALUES), features, what_if=what_if
    )


@_example("linformer")
def _linformer(what_if: WhatIf | None = None) -> Walkthrough:
    projection = LengthProjection(max_length=4, rank=2)
    with torch.no_grad():
        projection.weight.copy_(SegmentMeans(2)(4))
    query = _matrix(((2.0, 0.0, 0.0, 0.0), (0.0, 2.0, 0.0, 2.0)))
    key = _matrix(((2.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 2.0), (0.0, 2.0, 0.0, 0.0), (0.0, 0.0, 2.0, 2.0)))
    return mixture_walkthrough(query, key, _matrix((*VALUES[:2], (3.0, 1.0), (1.0, 1.0))), projection, what_if=what_if)


@_example("soft", ())
def _soft(_: WhatIf | None = None) -> Walkthrough:
    """Queries whose landmarks are not too near to each other: no other numbers take their place."""
    return soft_walkthrough(torch.tensor(((0.0,), (1.0,), (2.0,), (2.0,))), _matrix((*VALUES, (2.0, 2.0))), landmarks=2)


@_example("lara", ())
def _lara(_: WhatIf | None = None) -> Walkthrough:
    key = _matrix(((1.0,), (-1.0,), (0.0,), (2.0,)))
    return lara_walkthrough(_matrix(((0.0,), (1.0,))), key, _matrix((*VALUES, (2.0, 2.0))), landmarks=2)


@_example("hash-collisions")
def _hash_collisions(what_if: WhatIf | None = None) -> Walkthrough:
    """Queries and keys of norm 1, whose scores are cosines: no other numbers take their place."""
    query, key = torch.tensor(((1.0, 0.0), (0.0, 1.0))), torch.tensor(((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)))
    return walkthrough(
        *(query, key, _matrix(VALUES)),
        score=scores.Dot(),
        normalizer=normalizers.HashCollisions(2),
        what_if=what_if,
    )


@_example("ring")
def _ring(what_if: WhatIf | None = None) -> Walkthrough:
    query = _matrix(((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0)))
    key = _matrix(((1.0, 2.0), (0.0, 0.0), (2.0, 0.0), (1.0, 1.0)))
    own = range(2, 4)
    return merge_walkthrough(
        query,
        key,
        _matrix((*VALUES, (2.0, 2.0))),
        {"hop0": (own, own), "hop1": (own, range(2))},
        mask=masks.causal(),
        labels={
            "hop0": Wording("Hop 0, own keys", "0단계, 자기 키"),
            "hop1": Wording("Hop 1, keys of process 0", "1단계, 프로세스 0의 키"),
        },
        what_if=what_if,
    )
