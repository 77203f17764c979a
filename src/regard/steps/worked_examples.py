"""Worked examples with small whole numbers, one for each mechanism, that can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from ..nn import Attention, KVCache, LengthProjection, Projections
from ..positions import Rotation
from .approximation_steps import favor_walkthrough, mixture_walkthrough, state_tables, state_walkthrough
from .block_steps import merge_walkthrough, online_walkthrough
from .fresh_numbers import FreshNumbers
from .layer_steps import layer_walkthrough, linear_walkthrough
from .step_table import Walkthrough, make_table, numbered
from .table_formats import number_text
from .translation_steps import BAHDANAU_STEPS, LUONG_STEPS
from .walkthrough import product_example, walkthrough
from .wording import Wording

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

Rows = Sequence[Sequence[float]]
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class WorkedExample:
    """A named example: its title, and the function that computes its tables."""

    title: Wording
    make: Callable[[], Walkthrough]


EXAMPLES: dict[str, WorkedExample] = {}
"""The worked examples by name, in the order in which the mechanisms were published."""


def worked_example(name: str) -> Walkthrough:
    """The tables of a worked example of `EXAMPLES`, under its title.

    Raises:
        ConfigurationError: there is no example of that name; the message lists those that there are.

    >>> from regard.steps import worked_example
    >>> print(worked_example("luong-dot")["scores"])
    1. Attention scores    e_ij = q_i · k_j
          나는  학생  이다
      s1     1     0     2
      by hand: 1 · 1 + 0 · 1 = 1
    """
    if name not in EXAMPLES:
        raise ConfigurationError(f"there is no worked example {name!r}; {nearest(name, EXAMPLES)}")
    example = EXAMPLES[name]
    return replace(example.make(), title=example.title)


def _example(name: str, en: str, ko: str) -> Callable[[Callable[[], Walkthrough]], Callable[[], Walkthrough]]:
    """Register a function as the example of that name and title."""

    def register(make: Callable[[], Walkthrough]) -> Callable[[], Walkthrough]:
        EXAMPLES[name] = WorkedExample(Wording(en, ko), make)
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


def _decoder_step(score: scores.Score, **options: object) -> Walkthrough:
    """One decoder state over the annotations of a source of three words."""
    state, annotations = _matrix(STATE), _matrix(ANNOTATIONS)
    return walkthrough(state, annotations, annotations, score=score, queries=["s1"], keys=SOURCE, **options)  # type: ignore[arg-type]


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


def _six_words(mask: masks.Mask) -> Walkthrough:
    """Six positions under a mask, of which the last three have the numbers of the first three."""
    query, key, value = (_matrix(2 * rows) for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(query, key, value, score=scores.Dot(), mask=mask)


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


def _local_step(window: recurrent.MonotonicWindow | recurrent.PredictiveWindow) -> Walkthrough:
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
    )
    if not (isinstance(window, recurrent.PredictiveWindow) and isinstance(bias, Gaussian)):
        return steps
    weights = [
        make_table("centre_projection", window.hidden.weight, ["1", "2"]),
        make_table("centre_vector", window.centre.weight, ["v_p"]),
        make_table("centre", bias.center, ["s2"], example="4 · sigmoid(0) = 2"),
    ]
    return replace(steps, tables=(*steps.tables[:3], *weights, *steps.tables[3:]))


@_example("bahdanau", "Additive attention (Bahdanau et al. 2015)", "바다나우 어텐션: 덧셈(additive) 스코어")
def _bahdanau() -> Walkthrough:
    score = scores.Additive(2, 2, 2)
    _fill(score, query_weight=[[1, 0], [0, 1]], key_weight=[[1, 0], [1, -1]], weight=[1, 2])
    return _after_bahdanau(_decoder_step(score))


@_example("coverage", "Coverage in an additive score (See et al. 2017)", "덧셈 스코어의 커버리지")
def _coverage() -> Walkthrough:
    score = scores.Additive(2, 2, 2)
    _fill(score, query_weight=[[1, 0], [0, 1]], key_weight=[[1, 0], [1, -1]], weight=[1, 2])
    covered = _fill(recurrent.Covered(score), weight=[-1, -2])
    state, annotations = _matrix(STATE), _matrix(ANNOTATIONS)
    before = walkthrough(state, annotations, annotations, score=score)["weights"].numbers.float()  # of the first step
    with torch.no_grad():
        source = annotations[None]
        encoded = Encoded(source, torch.tensor([len(SOURCE)]), source[:, -1])
        term = covered(score, state[None], recurrent.RecurrentMemory(encoded, score.project_key(source)), before)[0]
    steps = walkthrough(state, annotations, annotations, score=score, bias=term, queries=["s2"], keys=SOURCE)
    coverage = make_table("coverage", before, ["c2"], SOURCE)
    at = steps.keys.index("bias")
    return replace(steps, tables=(*steps.tables[:at], coverage, *steps.tables[at:]))


@_example("luong-dot", "Dot attention (Luong et al. 2015)", "루옹 어텐션: 내적(dot) 스코어")
def _luong_dot() -> Walkthrough:
    return _after_luong(_decoder_step(scores.Dot()))


@_example("luong-general", "General attention (Luong et al. 2015)", "루옹 어텐션: general 스코어")
def _luong_general() -> Walkthrough:
    return _decoder_step(_fill(scores.General(2, 2), weight=[[1, 1], [0, 2]]))


@_example("luong-concat", "Concat attention (Luong et al. 2015)", "루옹 어텐션: concat 스코어")
def _luong_concat() -> Walkthrough:
    return _decoder_step(_fill(scores.Concat(2, 2, 2), matrix=[[1, 0, 1, 0], [0, 1, 0, -1]], weight=[2, 1]))


@_example("luong-location", "Location attention (Luong et al. 2015)", "루옹 어텐션: 위치(location) 스코어")
def _luong_location() -> Walkthrough:
    return _decoder_step(_fill(scores.Location(2, 3), weight=[[2, 0], [1, 1], [0, 3]]))


@_example("local-m", "Local attention around the target's own position (Luong et al. 2015)", "지역(local-m) 어텐션: 창")
def _local_m() -> Walkthrough:
    return _local_step(recurrent.MonotonicWindow(radius=1))


@_example(
    "local-p", "Local attention around a predicted position (Luong et al. 2015)", "지역(local-p) 어텐션: 가우시안"
)
def _local_p() -> Walkthrough:
    window = recurrent.PredictiveWindow(2, radius=1)
    _fill(window.hidden, weight=[[0, 1], [0, 2]])
    _fill(window.centre, weight=[[1, 1]])
    return _local_step(window)


@_example("scaled-dot-product", "Scaled dot-product attention (Vaswani et al. 2017)", "스케일드 닷 프로덕트 어텐션")
def _scaled_dot_product() -> Walkthrough:
    query = _matrix(((2, 0, 0, 0), (1, 1, 1, 1), (0, 2, 0, 2))).float()
    key = _matrix(((1, 0, 0, 1), (0, 1, 0, 1), (1, 1, 2, 0))).float()
    return walkthrough(query, key, _matrix(VALUES))


@_example("saturation", "Without 1/√d the softmax saturates", "√d로 나누지 않으면 소프트맥스가 포화한다")
def _saturation() -> Walkthrough:
    query = torch.tensor([[2.0, 2.0, 2.0, 2.0]])
    key = _matrix(((1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 1, 0))).float()
    before = walkthrough(query, key, _matrix(VALUES))
    return walkthrough(query, key, _matrix(VALUES), scale=1.0).compared(before)


@_example("projections", "Queries, keys and values from projections", "질의, 키, 값: 입력에 가중치 행렬을 곱해 얻는다")
def _projections() -> Walkthrough:
    query = ((2, 0, 0, 0), (0, 2, 1, 0), (2, 1, 0, 0), (0, 0, 0, 0))
    key = ((0, 2, 0, 0), (2, 0, 0, 0), (0, 0, 2, 0), (0, 0, 0, 2))
    value = ((1, 0), (0, 3), (1, 1), (1, 0))
    layer = _whole_layer(1, query, key, value, ((1, 0, 1, 0), (0, 1, 0, 1)))
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS)


@_example("self-attention", "Self-attention of one head", "셀프 어텐션")
def _self_attention() -> Walkthrough:
    words = _matrix(SENTENCE)
    return walkthrough(words, words, words, queries=WORDS, keys=WORDS)


@_example("cross-attention", "Cross-attention: queries of one sequence, keys and values of another", "크로스 어텐션")
def _cross_attention() -> Walkthrough:
    query = ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0), (0, 1, 0, 0))
    key = ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0))
    layer = _whole_layer(1, query, key, ((1, 0), (0, 3), (1, 1)), ((1, 0, 1, 0), (0, 1, 0, 1)))
    french, english = ((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 1.0)), ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    return layer_walkthrough(layer, _matrix((french,)), _matrix((english,)), queries=("le", "chat"), keys=WORDS)


@_example("multi-head", "Multi-head attention with two heads", "멀티 헤드 어텐션: 헤드 둘")
def _multi_head() -> Walkthrough:
    query = ((2, 0, 0, 1), (0, 1, 2, 0), (2, 0, 2, 0), (0, 0, 0, 0))
    key = ((0, 2, 0, 1), (2, 0, 0, 0), (0, 0, 2, 0), (0, 0, 0, 0))
    value = ((1, 0, 1, 0), (0, 3, 0, 2), (1, 1, 1, 0), (0, 0, 0, 1))
    output = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1), (0, 0, 1, -1))
    layer = _whole_layer(2, query, key, value, output)
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS)


@_example("causal-mask", "Causal mask: no word attends to a later one", "인과(causal) 마스크: 뒤의 단어는 보지 않는다")
def _causal_mask() -> Walkthrough:
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=masks.causal())


@_example("padding-mask", "Padding mask: the last key is no word", "패딩 마스크: 마지막 키는 단어가 아니다")
def _padding_mask() -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(*tensors, score=scores.Dot(), mask=masks.padding(lengths=[2]))


@_example("prefix-mask", "Prefix mask: all see the first two words", "접두(prefix) 마스크: 처음 두 단어는 모두가 본다")
def _prefix_mask() -> Walkthrough:
    mask = masks.causal() | masks.prefix(2)
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=mask)


@_example("document-mask", "Document mask: two texts in one sequence", "문서 마스크: 한 시퀀스에 든 두 글")
def _document_mask() -> Walkthrough:
    mask = masks.causal() & masks.documents([0, 0, 1])
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=mask)


@_example("window-mask", "Sliding window of two positions", "슬라이딩 윈도 마스크")
def _window_mask() -> Walkthrough:
    mask = masks.causal() & masks.window(before=1)
    return walkthrough(_matrix(QUERIES), _matrix(KEYS), _matrix(VALUES), score=scores.Dot(), mask=mask)


@_example("strided-mask", "Strided mask: a window and every third (Child et al. 2019)", "보폭(strided) 마스크")
def _strided_mask() -> Walkthrough:
    return _six_words(masks.causal() & (masks.window(before=1) | masks.strided(3)))


@_example("fixed-mask", "Fixed mask: blocks and their last words (Child et al. 2019)", "고정(fixed) 마스크")
def _fixed_mask() -> Walkthrough:
    return _six_words(masks.causal() & masks.fixed(3, 1))


@_example("dilated-mask", "Dilated window (Beltagy et al. 2020)", "팽창(dilated) 윈도 마스크")
def _dilated_mask() -> Walkthrough:
    return _six_words(masks.dilated(1, 2, after=1))


@_example("global-tokens", "Window and a global token (Beltagy et al. 2020)", "윈도와 전역(global) 토큰")
def _global_tokens() -> Walkthrough:
    return _six_words(masks.window(before=1, after=1) | masks.global_tokens([0]))


@_example(
    "absolute-positions",
    "Positions added to the embeddings: a quarter turn for each (Vaswani et al. 2017)",
    "임베딩에 더하는 위치: 한 위치에 90도씩",
)
def _absolute_positions() -> Walkthrough:
    words, names = _matrix(((2.0, 0.0), (0.0, 2.0), (2.0, 0.0))), ("the 1", "cat 2", "the 3")
    positions = torch.tensor(((0.0, 1.0), (1.0, 0.0), (0.0, -1.0)))  # sine and cosine of 0, 90 and 180 degrees
    weights = observe(words, words, words, Weights(), score=scores.Dot())[Weights()]
    inputs = words + positions
    steps = walkthrough(inputs, inputs, inputs, score=scores.Dot(), queries=names, keys=names)
    tables = [
        make_table("embeddings", words, names),
        make_table("plain_weights", weights, names, names, sums="rows"),
        make_table("positions", positions, names),
        make_table("input", inputs, names, wording="positioned"),
    ]
    return replace(steps, tables=(*tables, *steps.tables))


@_example("alibi", "ALiBi: a penalty for distance (Press et al. 2022)", "ALiBi: 거리에 비례하는 편향")
def _alibi() -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    bias = biases.alibi(torch.tensor([1.0]))
    return walkthrough(*tensors, score=scores.Dot(), mask=masks.causal(), bias=bias)


@_example("relative-bias", "Relative position bias (Shaw et al. 2018, Raffel et al. 2020)", "상대 위치 편향")
def _relative_bias() -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    bias = biases.clipped(torch.tensor([[-1.0, 0.0, 2.0]]), before=1, after=1)
    return walkthrough(*tensors, score=scores.Dot(), bias=bias)


@_example("rotary", "Rotary positions: a quarter turn for each position (Su et al. 2021)", "회전(rotary) 위치: 90도씩")
def _rotary() -> Walkthrough:
    turn = Rotation(torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([[0.0], [1.0], [0.0]]), "interleaved")
    query, key = _matrix(((1.0, 0.0),) * 3), _matrix(((1.0, 0.0), (1.0, 0.0), (2.0, 0.0)))
    steps = walkthrough(turn.rotate(query), turn.rotate(key), _matrix(VALUES), score=scores.Dot())
    names = [("q1", "q2", "q3"), ("k1", "k2", "k3")]
    before = [
        make_table(f"unrotated_{kind}", tensor, rows)
        for kind, tensor, rows in zip(("query", "key"), (query, key), names, strict=True)
    ]
    after = [
        make_table(table.key, table.numbers, table.rows, wording=f"rotated_{table.key}") for table in steps.tables[:2]
    ]
    return replace(steps, tables=(*before, *after, *steps.tables[2:]))


@_example(
    "grouped-query", "Grouped-query attention: four heads, two key heads (Ainslie et al. 2023)", "그룹 질의 어텐션"
)
def _grouped_query() -> Walkthrough:
    query = ((1, 0, 1, -1), (0, 1, 1, 0), (1, 0, 0, 1), (0, -1, 0, 0))
    key, value = ((0, 1), (2, 0), (0, 2), (0, 0)), ((1, 2), (3, 0), (0, 1), (1, 1))
    output = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    layer = _whole_layer(4, query, key, value, output, key_heads=2)
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS)


@_example("multi-query", "Multi-query attention: two heads, one key head (Shazeer 2019)", "멀티 쿼리 어텐션")
def _multi_query() -> Walkthrough:
    query, key, value = ((1, 0), (0, 1), (1, 0), (0, -1)), ((0,), (2,), (0,), (0,)), ((1,), (3,), (0,), (1,))
    layer = _whole_layer(2, query, key, value, ((1, 0, 1, 0), (0, 1, 0, 1)), key_heads=1)
    return layer_walkthrough(layer, _matrix((PARTS_OF_SPEECH,)), queries=WORDS, keys=WORDS)


@_example("cache", "A cache: a decoding step computes one row", "캐시: 디코딩 한 단계는 한 행만 계산한다")
def _cache() -> Walkthrough:
    query, key, value = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    with torch.no_grad():
        before = KVCache().append(key[:, :, :2], value[:, :, :2])
        after = before.append(key[:, :, 2:], value[:, :, 2:])
    steps = walkthrough(query[:, :, 2:], after.keys, after.values, score=scores.Dot(), queries=["q3"])
    cached = (
        make_table("cached_key", before.keys[0, 0], ["k1", "k2"]),
        make_table("cached_value", before.values[0, 0], ["k1", "k2"]),
    )
    return replace(steps, tables=(*cached, *steps.tables))


@_example("attention-sink", "An attention sink takes weight (Xiao et al. 2024)", "어텐션 싱크")
def _attention_sink() -> Walkthrough:
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(*tensors, score=scores.Dot(), sinks=torch.tensor([1.0]))


@_example("flash", "Flash attention: two tiles of keys, one softmax (Dao et al. 2022)", "플래시 어텐션: 타일 둘")
def _flash() -> Walkthrough:
    key = _matrix(((1.0, 2.0), (0.0, 0.0), (2.0, 0.0), (1.0, 1.0)))
    return online_walkthrough(_matrix(((1.0, 0.0), (0.0, 1.0))), key, _matrix((*VALUES, (2.0, 2.0))), width=2)


def _three_words(normalizer: Normalizer, mask: masks.Mask | None = None) -> Walkthrough:
    """Three words and another normalizer than softmax."""
    tensors = (_matrix(rows)[None, None] for rows in (QUERIES, KEYS, VALUES))
    return walkthrough(*tensors, score=scores.Dot(), mask=mask, normalizer=normalizer)


@_example("sparsemax", "Sparsemax: weights of exactly 0 (Martins and Astudillo 2016)", "스파스맥스: 정확히 0인 가중치")
def _sparsemax() -> Walkthrough:
    return _three_words(normalizers.Sparsemax())


@_example("top-scores", "Softmax over the two largest scores (Zhao et al. 2019)", "가장 큰 점수 둘의 소프트맥스")
def _top_scores() -> Walkthrough:
    return _three_words(normalizers.TopScores(2))


@_example("softmax1", "Softmax off by one: a row may attend to nothing (Miller 2023)", "분모에 1을 더한 소프트맥스")
def _softmax1() -> Walkthrough:
    return _three_words(normalizers.Softmax1())


@_example("sigmoid", "Sigmoid attention: each score alone (Ramapuram et al. 2024)", "시그모이드 어텐션: 점수마다 따로")
def _sigmoid() -> Walkthrough:
    return _three_words(normalizers.Sigmoid(-1.0))


@_example(
    "stick-breaking",
    "Stick-breaking: the nearest words take first (Tan et al. 2024)",
    "막대 쪼개기: 가까운 단어가 먼저 가져간다",
)
def _stick_breaking() -> Walkthrough:
    return _three_words(normalizers.StickBreaking(), masks.causal())


@_example("chosen-keys", "Chosen keys: two for each query (DeepSeek-V3.2 2025)", "고른 키: 쿼리마다 둘")
def _chosen_keys() -> Walkthrough:
    return _six_words(masks.chosen(torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [0, 4], [2, 5]])))


@_example("linear", "Linear attention (Katharopoulos et al. 2020)", "선형 어텐션")
def _linear() -> Walkthrough:
    tensors = _matrix(QUERIES), _matrix(KEYS), _matrix(VALUES)
    steps = linear_walkthrough(*tensors, feature_map=linear.Relu(), causal=True)
    return replace(steps, tables=(*steps.tables, *state_tables(*tensors, feature_map=linear.Relu())))


@_example("linear-decay", "Linear attention whose state is halved at each step (Sun et al. 2023)", "선형 어텐션: 감쇠")
def _linear_decay() -> Walkthrough:
    value = _matrix(((4.0, 0.0), (0.0, 4.0), (2.0, 2.0)))
    decay = torch.full((3,), 0.5).log()
    key, identity = _matrix(((1.0, 0.0),) * 3), linear.Identity()
    return state_walkthrough(key, key, value, feature_map=identity, normalize=False, scale=1.0, decay=decay)


@_example(
    "delta-rule", "Delta rule: a value replaces that of its key (Yang et al. 2024)", "델타 규칙: 키의 값을 바꾼다"
)
def _delta_rule() -> Walkthrough:
    key, query = _matrix(((1.0, 0.0), (0.0, 1.0), (1.0, 0.0))), _matrix(((1.0, 0.0), (1.0, 0.0), (1.0, 0.0)))
    options: LinearOptions = {"feature_map": linear.Identity(), "normalize": False, "scale": 1.0, "beta": torch.ones(3)}
    return state_walkthrough(query, key, _matrix(VALUES), **options)


@_example("performer", "Performer: two random features (Choromanski et al. 2021)", "퍼포머: 무작위 특징 둘")
def _performer() -> Walkthrough:
    features = linear.FavorPlus(1, 2, matrix=torch.tensor([[1.0], [-1.0]]))
    return favor_walkthrough(_matrix(((0.0,), (1.0,))), _matrix(((0.0,), (1.0,), (-1.0,))), _matrix(VALUES), features)


@_example("linformer", "Linformer: two mixtures of four keys (Wang et al. 2020)", "린포머: 키 넷을 둘로 섞는다")
def _linformer() -> Walkthrough:
    projection = LengthProjection(max_length=4, rank=2)
    with torch.no_grad():
        projection.weight.copy_(SegmentMeans(2)(4))
    query = _matrix(((2.0, 0.0, 0.0, 0.0), (0.0, 2.0, 0.0, 2.0)))
    key = _matrix(((2.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 2.0), (0.0, 2.0, 0.0, 0.0), (0.0, 0.0, 2.0, 2.0)))
    return mixture_walkthrough(query, key, _matrix((*VALUES[:2], (3.0, 1.0), (1.0, 1.0))), projection)


@_example("ring", "Ring attention: the second of two processes (Liu et al. 2023)", "링 어텐션: 두 프로세스 중 둘째")
def _ring() -> Walkthrough:
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
    )
