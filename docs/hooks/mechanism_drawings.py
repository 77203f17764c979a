"""Drawings of the flow of data, from shapes and numbers that regard computes, in English and Korean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from svg_canvas import Canvas

import regard
from regard import masks, ring, scores
from regard.nn import KVCache, Projections
from regard.steps import Walkthrough, worked_example
from regard.steps.table_formats import number_text

Say = Callable[[str, str], str]
"""The English or the Korean one of two texts."""
WORDS, STATE, ANNOTATION = 7, 10, 12
"""Source words, and the sizes of a decoder state and of an annotation, as in the code of the pages."""
CELL = (34.0, 22.0)
HEADS = 8


def bahdanau_and_luong(say: Say) -> list[Canvas]:
    """Which state attends: the one before the step, or the one after it."""
    score = scores.Additive(query_dim=STATE, key_dim=ANNOTATION, hidden_dim=16)
    state, annotations = torch.randn(1, STATE), torch.randn(WORDS, ANNOTATION)
    additive = regard.attention(state, annotations, annotations, score=score)[0]
    general = regard.attention(state, annotations, annotations, score=scores.General(STATE, ANNOTATION))[0]
    step = say("decoder cell (GRU)", "디코더 셀 (GRU)")
    word, next_word = say("word y_{t−1}", "단어 y_{t−1}"), say("P(y_t)", "P(y_t)")
    of_words = say(f"annotations h_1 … h_{WORDS}", f"주석 h_1 … h_{WORDS}")
    first = Canvas(350, 440, say("Bahdanau: attend with s_{t−1}, then step", "바다나우: s_{t−1}로 보고 나서 한 단계"))
    first.text(175, 16, first.title, "title")
    first.box(10, 34, 110, 40, ["s_{t−1}", shape(state[0])], "query")
    first.box(170, 34, 170, 40, [of_words, shape(annotations)], "key")
    first.box(70, 104, 210, 40, ["v · tanh(W s_{t−1} + U h_j)", f"({WORDS})"])
    first.box(70, 174, 210, 40, [say("softmax: weights a_t", "소프트맥스: 가중치 a_t"), f"({WORDS})"], "weight-box")
    first.box(
        70, 244, 210, 40, [say("context c_t = Σ a_{tj} h_j", "문맥 c_t = Σ a_{tj} h_j"), shape(additive)], "value"
    )
    first.box(70, 314, 170, 34, step)
    first.box(70, 384, 100, 40, ["s_t", shape(state[0])], "query")
    first.box(220, 384, 110, 40, next_word)
    first.arrow((65, 74), (110, 104))
    first.arrow((255, 74), (230, 104))
    first.arrow((175, 144), (175, 174))
    first.arrow((175, 214), (175, 244))
    first.arrow((325, 74), (325, 264), (280, 264))
    first.arrow((175, 284), (175, 314))
    first.arrow((25, 74), (25, 331), (70, 331))
    first.text(246, 331, word, "small", "start")
    first.arrow((120, 348), (120, 384))
    first.arrow((170, 404), (220, 404))
    return [first, _luong(say, step, word, of_words, shape(state[0]), shape(annotations), shape(general))]


def _luong(say: Say, step: str, word: str, of_words: str, state: str, annotations: str, context: str) -> Canvas:
    drawn = Canvas(350, 440, say("Luong: step, then attend with s_t", "루옹: 한 단계 나아가고 s_t로 보기"))
    drawn.text(175, 16, drawn.title, "title")
    drawn.box(10, 34, 110, 40, ["s_{t−1}", state], "query")
    drawn.box(10, 104, 110, 34, step.split(" (")[0])
    drawn.box(10, 174, 110, 40, ["s_t", state], "query")
    drawn.box(170, 34, 170, 40, [of_words, annotations], "key")
    drawn.box(170, 174, 120, 40, ["s_t W h_j", f"({WORDS})"])
    drawn.box(130, 244, 180, 40, [say("softmax: weights a_t", "소프트맥스: 가중치 a_t"), f"({WORDS})"], "weight-box")
    drawn.box(130, 314, 180, 34, [f"{say('context c_t', '문맥 c_t')} {context}"], "value")
    drawn.box(10, 384, 210, 40, "s̃_t = tanh(W_c [c_t; s_t])")
    drawn.box(260, 384, 80, 40, "P(y_t)")
    drawn.arrow((65, 74), (65, 104))
    drawn.text(126, 121, word, "small", "start")
    drawn.arrow((65, 138), (65, 174))
    drawn.arrow((120, 194), (170, 194))
    drawn.arrow((230, 74), (230, 174))
    drawn.arrow((230, 214), (230, 244))
    drawn.arrow((220, 284), (220, 314))
    drawn.arrow((328, 74), (328, 331), (310, 331))
    drawn.arrow((65, 214), (65, 384))
    drawn.arrow((180, 348), (180, 384))
    drawn.arrow((220, 404), (260, 404))
    return drawn


def attention_shapes(say: Say) -> list[Canvas]:
    """Q Kᵀ, its softmax, and the product with V, with the numbers of the worked example."""
    steps = worked_example("scaled-dot-product")
    query, key, value = (texts(steps, name) for name in ("query", "key", "value"))
    scored, weights, context = (texts(steps, name) for name in ("scaled_scores", "weights", "context"))
    small = (24.0, 22.0)
    first = Canvas(340, 150, say("Scores: Q times Kᵀ, over √D", "점수: Q에 Kᵀ를 곱하고 √D로 나눈다"))
    first.text(170, 14, first.title, "title")
    first.matrix(10, 48, query, small, "query")
    first.text(115, 81, "·")
    first.matrix(124, 37, [list(column) for column in zip(*key, strict=True)], small, "key")
    first.text(226, 81, "/ √4 =")
    first.matrix(256, 48, scored, (26.0, 22.0), "plain")
    for x, label in ((58, f"Q {shape(query)}"), (160, f"Kᵀ {shape(key, turned=True)}"), (295, shape(scored))):
        first.text(x, 140, label, "small")
    second = Canvas(340, 150, say("Softmax of each row, times V", "행마다 소프트맥스, 그다음 V를 곱한다"))
    second.text(170, 14, second.title, "title")
    second.matrix(10, 48, weights, (40.0, 22.0), "weight")
    second.text(143, 81, "·")
    second.matrix(158, 48, value, (26.0, 22.0), "value")
    second.text(224, 81, "=")
    second.matrix(240, 48, context, (44.0, 22.0), "value")
    for x, label in ((70, f"A {shape(weights)}"), (184, f"V {shape(value)}"), (284, f"C {shape(context)}")):
        second.text(x, 140, label, "small")
    return [first, second]


def multi_head(say: Say) -> list[Canvas]:
    """The queries split into heads, each head's attention, and the contexts joined again."""
    steps = worked_example("multi-head")
    drawn = Canvas(360, 370, say("Split, attend side by side, join", "나누고, 나란히 보고, 다시 잇는다"))
    drawn.text(180, 14, drawn.title, "title")
    queries = [texts(steps, f"head{head}.query") for head in (1, 2)]
    whole = [[*left, *right] for left, right in zip(*queries, strict=True)]
    cell = (26.0, 22.0)
    for head, kind in ((0, "query"), (1, "other")):
        drawn.matrix(128 + 52 * head, 34, queries[head], cell, kind)
    drawn.text(240, 67, f"Q {shape(whole)}", "small", "start")
    for number, (kind, left) in enumerate((("query", 8), ("other", 188)), start=1):
        weights, context = texts(steps, f"head{number}.weights"), texts(steps, f"head{number}.context")
        drawn.arrow((154 if number == 1 else 206, 100), (left + 78, 128))
        drawn.text(left + 78, 140, f"{say('head', '헤드')} {number}: Q_{{{number}}} {shape(queries[number - 1])}")
        drawn.matrix(left + 20, 152, weights, (40.0, 22.0), "weight")
        drawn.text(left + 80, 230, f"A_{{{number}}} {shape(weights)}", "small")
        drawn.arrow((left + 80, 238), (154 if number == 1 else 206, 262))
        drawn.matrix(92 + 88 * (number - 1), 266, context, (44.0, 22.0), kind)
    joined = texts(steps, "concatenation")
    drawn.text(180, 346, f"{say('joined', '이은 것')}: {shape(joined)}", "small")
    drawn.text(180, 362, f"· W_o → {shape(texts(steps, 'output'))}", "small")
    return [drawn]


def cache(say: Say) -> list[Canvas]:
    """What one step reads, what it adds, and what it computes."""
    drawn = Canvas(350, 214, say("One query, one new key and value a step", "단계마다 질의 하나, 새 키와 값 하나"))
    drawn.text(175, 14, drawn.title, "title")
    stored, token = KVCache(), torch.zeros(1, 2, 1, 16)
    for step in range(1, 5):
        with torch.no_grad():
            stored = stored.append(token, token)
        top = 34 + 40 * (step - 1)
        drawn.box(8, top, 44, 26, f"q_{{{step}}}", "query")
        drawn.arrow((52, top + 13), (74, top + 13))
        for number in range(1, len(stored) + 1):
            drawn.box(78 + 40 * (number - 1), top, 34, 26, f"k_{{{number}}}", "new" if number == step else "key")
        drawn.text(346, top + 13, shape(stored.keys[0]), "small", "end")
    drawn.text(
        175,
        204,
        say(
            "keys: (key heads, tokens, D); thick: added in this step",
            "키: (키 헤드, 토큰, D). 굵은 것: 이 단계에 더한 것",
        ),
        "small",
    )
    return [drawn]


def grouped_heads(say: Say) -> list[Canvas]:
    """Which key head each query head reads, and the numbers that a cache then has for a token."""
    drawn = []
    names = {HEADS: "multi-head", 2: "grouped-query", 1: "multi-query"}
    for groups, name in names.items():
        maps = Projections(512, num_heads=HEADS, num_kv_heads=groups, bias=False)
        stored = maps.key.weight.shape[0] + maps.value.weight.shape[0]
        panel = Canvas(340, 128, name)
        panel.text(170, 14, panel.title, "title")
        for head in range(HEADS):
            x = 12 + 40 * head
            panel.box(x, 28, 34, 24, f"Q_{{{head + 1}}}", "query")
            group = head * groups // HEADS
            panel.line((x + 17, 52), (_centre(group, groups), 76))
        for group in range(groups):
            panel.box(_centre(group, groups) - 17, 76, 34, 24, f"K_{{{group + 1}}}", "key")
        counted = say(f"cached for each token: {stored} numbers", f"토큰 하나에 저장하는 수: {stored}개")
        panel.text(170, 118, counted, "small")
        drawn.append(panel)
    return drawn


def _centre(group: int, groups: int) -> float:
    return 12 + 40 * ((group + 0.5) * HEADS / groups) - 3


def flash_tiles(say: Say) -> list[Canvas]:
    """The two tiles of the worked example, and maximum, total and sums of each query after each tile."""
    steps = worked_example("flash")
    scored = texts(steps, "scores")
    drawn = Canvas(350, 312, say("One tile after another", "한 타일씩"))
    drawn.text(175, 14, drawn.title, "title")
    drawn.text(24, 66, "q_1", "small")
    drawn.text(24, 94, "q_2", "small")
    for tile in (1, 2):
        left = 44 + 160 * (tile - 1)
        for number in (1, 2):
            drawn.text(left + 32 + 60 * (number - 1), 36, f"k_{{{2 * tile - 2 + number}}}", "small")
        drawn.matrix(left, 52, [row[2 * tile - 2 : 2 * tile] for row in scored], (62.0, 28.0), "key")
        drawn.text(left + 62, 122, say(f"tile {tile}", f"타일 {tile}"), "small")
        drawn.arrow((left + 62, 132), (left + 62, 160))
        state = texts(steps, f"running.{tile}")
        for row, (peak, total, *_) in enumerate(state):
            lines = [f"q_{{{row + 1}}}:  m = {peak}", f"l = {total}"]
            drawn.box(left - 8, 164 + 60 * row, 140, 44, lines, "weight-box")
    for row, (factor,) in enumerate(texts(steps, "shrink.2")):
        drawn.arrow((176, 186 + 60 * row), (196, 186 + 60 * row))
        drawn.text(186, 215 + 60 * row, f"× {factor}", "small")
    drawn.text(175, 302, say("older sums shrink by e^(m − new m)", "앞의 합은 e^(m − 새 m)만큼 줄어든다"), "small")
    return [drawn]


def ring_hops(say: Say) -> list[Canvas]:
    """The keys that each process has in each hop; under a causal mask those of later blocks are of no use."""
    count = 4
    pieces = ring.Contiguous().pieces(16, count)
    keep = masks.causal().dense(16, 16)
    drawn = Canvas(350, 262, say("Keys travel around the ring", "키가 고리를 돈다"))
    drawn.text(175, 14, drawn.title, "title")
    for process in range(count):
        x = 62 + 74 * process
        drawn.box(x, 28, 60, 26, f"p{process}: Q_{{{process}}}", "query")
        for hop in range(count):
            block = (process - hop) % count
            used = bool(keep[list(pieces[process][0])][:, list(pieces[block][0])].any())
            drawn.box(x, 68 + 44 * hop, 60, 30, f"K_{{{block}}} V_{{{block}}}", "key" if used else "unused")
            if hop and process:
                drawn.arrow((x - 14, 68 + 44 * hop - 14), (x + 4, 68 + 44 * hop))
    for hop in range(count):
        drawn.text(8, 83 + 44 * hop, say(f"hop {hop}", f"{hop}단계"), "small", "start")
    drawn.text(
        175,
        252,
        say("dashed: masked, nothing is computed; p3 sends to p0", "점선: 가려져 계산하지 않는다. p3은 p0에 보낸다"),
        "small",
    )
    return [drawn]


def texts(steps: Walkthrough, key: str) -> list[list[str]]:
    """The numbers of a table as they are printed."""
    return [[number_text(number, 3) for number in row] for row in steps[key].numbers.tolist()]


def shape(of: torch.Tensor | list[list[str]], *, turned: bool = False) -> str:
    """A shape in brackets; of a table of texts its rows and columns."""
    sizes = tuple(of.shape) if isinstance(of, torch.Tensor) else (len(of), len(of[0]))
    return f"({', '.join(map(str, reversed(sizes) if turned else sizes))})"


DRAWINGS: dict[str, Callable[[Say], list[Canvas]]] = {
    "bahdanau-and-luong": bahdanau_and_luong,
    "attention-shapes": attention_shapes,
    "multi-head": multi_head,
    "cache": cache,
    "grouped-heads": grouped_heads,
    "flash-tiles": flash_tiles,
    "ring-hops": ring_hops,
}
