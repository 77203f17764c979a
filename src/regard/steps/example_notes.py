"""What the tables of a worked example do not say, such as the numbers of its gates."""

from __future__ import annotations

from .wording import Wording

NOTES = {
    "bahdanau": Wording(
        "Both gates of the GRU are 1/2: s_2 = (tanh(W_n [y1; c2]) + s_1) / 2.",
        "GRU의 두 게이트는 모두 1/2입니다. s_2 = (tanh(W_n [y1; c2]) + s_1) / 2.",
    ),
    "local-p": Wording("The source has S = 4 words.", "원문의 길이는 S = 4입니다."),
    "rotary": Wording(
        "A vector at position m, from 0, is turned by m quarter turns, each of which makes (-b, a) of (a, b).",
        "위치 m(0부터)의 벡터는 90도씩 m번 회전합니다. 한 번 회전하면 (a, b)가 (-b, a)가 됩니다.",
    ),
    "transformer-block": Wording(
        "A norm takes the mean of a row from it and divides by its standard deviation; b_1 and b_2 are 0.",
        "정규화는 행에서 평균을 빼고 표준편차로 나눕니다. 신경망의 b_1과 b_2는 0입니다.",
    ),
    "attention-sink": Wording("The score of the sink is 1.", "싱크의 점수는 1입니다."),
    "top-scores": Wording(
        "Softmax over the two largest scores of a row; the other weights are 0.",
        "행마다 가장 큰 점수 둘에만 소프트맥스를 적용하고, 나머지 가중치는 0입니다.",
    ),
    "softmax1": Wording("a_ij = exp(e_ij) / (1 + Σ_k exp(e_ik))", "a_ij = exp(e_ij) / (1 + Σ_k exp(e_ik))"),
    "sigmoid": Wording("b = -1", "b = -1"),
    "linear": Wording("φ(x) = max(x, 0)", "φ(x) = max(x, 0)"),
    "linear-decay": Wording("φ(x) = x, and e^g = 1/2.", "φ(x) = x이고 e^g = 1/2입니다."),
    "delta-rule": Wording("φ(x) = x, and β_t = 1.", "φ(x) = x이고 β_t = 1입니다."),
    "titans": Wording(
        "θ_t = 1, η_t = 1/2 and e^g = 1/2; W_0 and Z_0 are 0.",
        "θ_t = 1, η_t = 1/2, e^g = 1/2이고 W_0과 Z_0은 0입니다.",
    ),
    "ttt-linear": Wording(
        "θ_t = 1, and each position is a mini-batch of its own. mean(x) is the mean of the features of x, the variance "
        "of z that of (z - mean(z))², and ε = 10⁻³⁰ changes no digit.",
        "θ_t = 1이고 위치 하나가 미니배치 하나입니다. mean(x)는 x의 특징을 평균한 값이고, z의 분산은 (z - mean(z))²의 "
        "평균입니다. ε = 10⁻³⁰은 어느 자리도 바꾸지 않습니다.",
    ),
    "s4d": Wording(
        "One channel with one complex state, i² = -1; the state before the first position is 0.",
        "채널 하나에 복소수 상태 하나가 있고 i² = -1입니다. 첫 위치 앞의 상태는 0입니다.",
    ),
    "soft": Wording(
        "Queries are the keys too. D = 1, and the two segments have two queries each. Rows do not sum to 1.",
        "질의가 곧 키입니다. D = 1이고 두 구간에 질의가 둘씩 있습니다. 행의 합은 1이 아닙니다.",
    ),
    "lara": Wording(
        "D = 1, so that the scale is 1. Segment 1 has q1, k1 and k2, segment 2 has q2, k3 and k4. In training noise is "
        "added to the samples; here there is none.",
        "D = 1이므로 스케일은 1입니다. 구간 1에는 q1, k1, k2가, 구간 2에는 q2, k3, k4가 있습니다. 학습할 때는 표본에 "
        "잡음을 더하고, 여기에는 잡음이 없습니다.",
    ),
    "performer": Wording(
        "m = 2; with one feature, q' = q and k' = k.", "m = 2이고, 특징이 하나이므로 q' = q, k' = k입니다."
    ),
    "grouped-query": Wording(
        "Heads 1 and 2 share one key head, heads 3 and 4 the other.",
        "헤드 1과 2가 키 헤드 하나를, 헤드 3과 4가 다른 하나를 함께 씁니다.",
    ),
    "multi-query": Wording("Both heads share one key head.", "두 헤드가 키 헤드 하나를 함께 씁니다."),
    "flash": Wording("A tile has two keys.", "타일 하나에 키가 둘입니다."),
    "ring": Wording(
        "The process has positions 3 and 4, and no position attends to a later one.",
        "이 프로세스는 위치 3과 4를 맡고, 어느 위치도 뒤의 위치를 보지 않습니다.",
    ),
}
"""By the name of the example."""
