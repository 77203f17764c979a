"""English and Korean words of the steps: titles, formulas, and the terms of tables."""

from __future__ import annotations

from typing import NamedTuple

from ..utils.bilingual import Language as Language
from ..utils.bilingual import Wording as Wording
from ..utils.bilingual import check_language as check_language


class StepWording(NamedTuple):
    """The title of a step, and its formula as plain text and in LaTeX."""

    title: Wording
    formula: str
    latex: str


SUM = Wording("sum", "합")
MORE = Wording("… {} more", "… 외 {}개")
BY_HAND = Wording("by hand", "손으로")
CHANGED = Wording("* changed", "* 바뀐 값")

SOFTMAX = StepWording(
    Wording("Attention weights: softmax of each row", "어텐션 가중치(어텐션 분포): 행마다 소프트맥스"),
    "a_ij = exp(e_ij) / Σ_k exp(e_ik)",
    r"a_{ij} = \frac{\exp e_{ij}}{\sum_k \exp e_{ik}}",
)

STEPS = {
    # What attention is computed from
    "query": StepWording(Wording("Queries Q", "질의(Query) Q"), "Q", "Q"),
    "key": StepWording(Wording("Keys K", "키(Key) K"), "K", "K"),
    "value": StepWording(Wording("Values V", "값(Value) V"), "V", "V"),
    "input": StepWording(Wording("Input X", "입력 X"), "X", "X"),
    "memory": StepWording(Wording("Memory Y", "메모리 Y"), "Y", "Y"),
    "query_projection": StepWording(Wording("Query projection W_q", "질의 가중치 행렬 W_q"), "W_q", "W_q"),
    "key_projection": StepWording(Wording("Key projection W_k", "키 가중치 행렬 W_k"), "W_k", "W_k"),
    "value_projection": StepWording(Wording("Value projection W_v", "값 가중치 행렬 W_v"), "W_v", "W_v"),
    "output_projection": StepWording(Wording("Output projection W_o", "출력 가중치 행렬 W_o"), "W_o", "W_o"),
    "unrotated_query": StepWording(Wording("Queries before rotation", "회전 전 질의"), "X W_q", "X W_q"),
    "unrotated_key": StepWording(Wording("Keys before rotation", "회전 전 키"), "X W_k", "X W_k"),
    "rotated_query": StepWording(Wording("Queries, rotated by position", "위치만큼 회전한 질의"), "R_i q_i", "R_i q_i"),
    "rotated_key": StepWording(Wording("Keys, rotated by position", "위치만큼 회전한 키"), "R_j k_j", "R_j k_j"),
    "embeddings": StepWording(Wording("Embeddings of the words", "단어 임베딩"), "x_i", "x_i"),
    "positions": StepWording(Wording("Position embeddings", "위치 임베딩"), "p_i", "p_i"),
    "positioned": StepWording(
        Wording("Input: embeddings plus positions", "입력: 임베딩 + 위치"), "x_i + p_i", "x_i + p_i"
    ),
    "plain_weights": StepWording(
        Wording("Weights without positions", "위치가 없을 때의 가중치"),
        "a_ij = exp(x_i · x_j) / Σ_k exp(x_i · x_k)",
        r"a_{ij} = \frac{\exp(x_i \cdot x_j)}{\sum_k \exp(x_i \cdot x_k)}",
    ),
    "cached_key": StepWording(
        Wording("Keys in the cache", "캐시에 있는 키"), "k_1, ..., k_{t-1}", r"k_1, \dots, k_{t-1}"
    ),
    "cached_value": StepWording(
        Wording("Values in the cache", "캐시에 있는 값"), "v_1, ..., v_{t-1}", r"v_1, \dots, v_{t-1}"
    ),
    # Scores
    "weight_matrix": StepWording(Wording("Weight matrix W", "가중치 행렬 W"), "W", "W"),
    "projected_query": StepWording(Wording("Queries times W", "W를 곱한 질의"), "W q_i", "W q_i"),
    "projected_key": StepWording(Wording("Keys times U", "U를 곱한 키"), "U k_j", "U k_j"),
    "sum": StepWording(Wording("Sums", "합"), "W q_i + U k_j", "W q_i + U k_j"),
    "tanh": StepWording(Wording("tanh of each number", "각 수의 tanh"), "tanh(W q_i + U k_j)", r"\tanh(W q_i + U k_j)"),
    "score_vector": StepWording(Wording("Vector v", "벡터 v"), "v", "v"),
    "additive_scores": StepWording(
        Wording("Attention scores", "어텐션 점수(스코어)"),
        "e_ij = v · tanh(W q_i + U k_j)",
        r"e_{ij} = v^\top \tanh(W q_i + U k_j)",
    ),
    "scores": StepWording(
        Wording("Attention scores", "어텐션 점수(스코어)"), "e_ij = q_i · k_j", r"e_{ij} = q_i \cdot k_j"
    ),
    "general_query": StepWording(Wording("Queries times W", "W를 곱한 질의"), "q_i W", "q_i W"),
    "general_scores": StepWording(
        Wording("Attention scores", "어텐션 점수(스코어)"), "e_ij = q_i W · k_j", r"e_{ij} = q_i W k_j^\top"
    ),
    "location_scores": StepWording(
        Wording("Attention scores: a row of W for each position", "어텐션 점수(스코어): 위치마다 W의 한 행"),
        "e_ij = (W q_i)_j",
        "e_{ij} = (W q_i)_j",
    ),
    "scaled_scores": StepWording(
        Wording("Scores times the scale {}", "점수 × 스케일 {}"),
        "e_ij = {} · q_i · k_j",
        r"e_{ij} = {} \, q_i \cdot k_j",
    ),
    "capped_scores": StepWording(
        Wording("Scores, capped", "상한을 둔 점수"), "e_ij = c · tanh(e_ij / c)", r"e_{ij} = c \tanh(e_{ij} / c)"
    ),
    "bias": StepWording(Wording("Bias B", "편향 B"), "B", "B"),
    "mask": StepWording(Wording("Mask M: 1 = attend", "마스크 M: 1 = 참조"), "M", "M"),
    "masked_scores": StepWording(
        Wording("Scores with the mask", "마스크를 적용한 점수"),
        "e_ij if M_ij = 1, else -∞",
        r"e_{ij} \text{ if } M_{ij} = 1, \text{ else } -\infty",
    ),
    "biased_scores": StepWording(Wording("Scores with the bias", "편향을 더한 점수"), "e_ij + B_ij", "e_{ij} + B_{ij}"),
    "biased_and_masked_scores": StepWording(
        Wording("Scores with bias and mask", "편향과 마스크를 적용한 점수"),
        "e_ij + B_ij if M_ij = 1, else -∞",
        r"e_{ij} + B_{ij} \text{ if } M_{ij} = 1, \text{ else } -\infty",
    ),
    # Weights and context
    "exponentials": StepWording(Wording("Exponentials", "지수 함수값"), "exp(e_ij)", r"\exp e_{ij}"),
    "shifted_exponentials": StepWording(
        Wording("Exponentials, less the largest score of the row", "행의 가장 큰 점수를 뺀 지수 함수값"),
        "exp(e_ij - max_k e_ik)",
        r"\exp(e_{ij} - \max_k e_{ik})",
    ),
    "weights": SOFTMAX,
    "weighted_values": StepWording(
        Wording("Weighted values of {}", "{}: 가중 값(가중치 × 값)"), "a_ij v_j", r"a_{ij} v_j"
    ),
    "context": StepWording(
        Wording("Context", "문맥 벡터(어텐션 값)"), "c_i = Σ_j a_ij v_j", r"c_i = \sum_j a_{ij} v_j"
    ),
    "concatenation": StepWording(
        Wording("Contexts of all heads, concatenated", "모든 헤드의 문맥 벡터를 연결"),
        "[c_1; …; c_H]",
        r"[c_1; \dots; c_H]",
    ),
    "output": StepWording(Wording("Output", "출력"), "[c_1; …; c_H] W_o", r"[c_1; \dots; c_H] W_o"),
    # The rest of a Transformer block
    "residual": StepWording(
        Wording("Residual path: what goes in plus what comes out", "잔차 연결: 들어간 값 + 나온 값"),
        "x + f(x)",
        "x + f(x)",
    ),
    "normalized": StepWording(
        Wording(
            "Layer norm: each row less its mean, over its deviation",
            "층 정규화: 행마다 평균을 빼고 표준편차로 나눕니다",
        ),
        "γ (x - mean) / √(variance + ε) + β",
        r"\gamma \frac{x - \mathrm{mean}}{\sqrt{\mathrm{variance} + \varepsilon}} + \beta",
    ),
    "up_projection": StepWording(
        Wording("Feed-forward network: matrix W_1", "피드포워드 신경망: 가중치 행렬 W_1"), "W_1", "W_1"
    ),
    "up_bias": StepWording(Wording("Feed-forward network: bias b_1", "피드포워드 신경망: 편향 b_1"), "b_1", "b_1"),
    "hidden": StepWording(
        Wording("Feed-forward network: hidden features, at least 0", "피드포워드 신경망: 은닉 특징, 0 이상"),
        "max(0, x W_1 + b_1)",
        r"\max(0, x W_1 + b_1)",
    ),
    "down_projection": StepWording(
        Wording("Feed-forward network: matrix W_2", "피드포워드 신경망: 가중치 행렬 W_2"), "W_2", "W_2"
    ),
    "down_bias": StepWording(Wording("Feed-forward network: bias b_2", "피드포워드 신경망: 편향 b_2"), "b_2", "b_2"),
    "feed_forward": StepWording(
        Wording("Output of the feed-forward network", "피드포워드 신경망의 출력"),
        "max(0, x W_1 + b_1) W_2 + b_2",
        r"\max(0, x W_1 + b_1) W_2 + b_2",
    ),
    # Linear attention
    "query_features": StepWording(Wording("Features of the queries", "질의의 특징"), "φ(q_i)", r"\varphi(q_i)"),
    "key_features": StepWording(Wording("Features of the keys", "키의 특징"), "φ(k_j)", r"\varphi(k_j)"),
    "feature_products": StepWording(
        Wording("Products of features", "특징의 내적"),
        "s_ij = φ(q_i) · φ(k_j)",
        r"s_{ij} = \varphi(q_i) \cdot \varphi(k_j)",
    ),
    "linear_weights": StepWording(
        Wording("Weights: each product over its row's sum", "가중치: 행의 합으로 나눈 값"),
        "a_ij = s_ij / Σ_k s_ik",
        r"a_{ij} = \frac{s_{ij}}{\sum_k s_{ik}}",
    ),
    "normalizer_weights": StepWording(
        Wording("Attention weights: by the normalizer, row by row", "어텐션 가중치: 행마다 정규화 함수로 계산한 값"),
        "a_ij = w(e_i1, …, e_in)_j",
        r"a_{ij} = w(e_{i1}, \dots, e_{in})_j",
    ),
    "weights.sigmoid": StepWording(
        Wording("Attention weights: the sigmoid of each score", "어텐션 가중치: 점수마다 시그모이드"),
        "a_ij = 1 / (1 + exp(-e_ij - b))",
        r"a_{ij} = \sigma(e_{ij} + b)",
    ),
    "weights.sparsemax": StepWording(
        Wording("Attention weights: sparsemax of each row", "어텐션 가중치: 행마다 스파스맥스"),
        "a_ij = max(e_ij - τ_i, 0), with the τ_i for which a row sums to 1",
        r"a_{ij} = \max(e_{ij} - \tau_i, 0)",
    ),
    "weights.entmax": StepWording(
        Wording("Attention weights: entmax of each row", "어텐션 가중치: 행마다 엔트맥스"),
        "a_ij = max((α - 1) e_ij - τ_i, 0)^(1 / (α - 1)), with the τ_i for which a row sums to 1",
        r"a_{ij} = \max((\alpha - 1) e_{ij} - \tau_i, 0)^{1 / (\alpha - 1)}",
    ),
    "weights.top scores": StepWording(
        Wording(
            "Attention weights: softmax over the largest of each row", "어텐션 가중치: 행마다 큰 점수들의 소프트맥스"
        ),
        "a_ij = exp(e_ij) / Σ_k exp(e_ik), k of the largest",
        r"a_{ij} = \frac{e^{e_{ij}}}{\sum_{k \in \mathrm{top}_i} e^{e_{ik}}}",
    ),
    "weights.stick-breaking": StepWording(
        Wording("Attention weights: what later keys have left", "어텐션 가중치: 뒤의 키가 남긴 것"),
        "a_ij = σ(e_ij) Π_(k > j) (1 - σ(e_ik))",
        r"a_{ij} = \sigma(e_{ij}) \prod_{k > j} (1 - \sigma(e_{ik}))",
    ),
    "weights.linear-chain": StepWording(
        Wording("Attention weights: selected together with neighbours", "어텐션 가중치: 이웃과 함께 골라질 확률"),
        "a_ij = p(z_j = 1), with p(z) in proportion to exp(Σ_j e_ij z_j + Σ_j b[z_j, z_j+1])",
        r"a_{ij} = p(z_j = 1),\; p(z) \propto e^{\sum_j e_{ij} z_j + b_{z_j z_{j+1}}}",
    ),
    "weights.dependency-trees": StepWording(
        Wording("Attention weights: what the parent of each word is", "어텐션 가중치: 각 단어의 부모일 확률"),
        "a_ij = p(the parent of i is j), a_ii that i is a root, with p(tree) in proportion to exp(Σ_i e_i,parent(i))",
        r"a_{ij} = p(\mathrm{parent}(i) = j),\; p(\mathrm{tree}) \propto e^{\sum_i e_{i, \mathrm{parent}(i)}}",
    ),
    "weights.projective-trees": StepWording(
        Wording(
            "Attention weights: the parent of each word, of trees without crossings",
            "어텐션 가중치: 엇갈리지 않는 트리에서 각 단어의 부모일 확률",
        ),
        "a_ij = p(the parent of i is j), p(tree) in proportion to exp(Σ_i e_i,parent(i)), of trees without crossings",
        r"a_{ij} = p(\mathrm{parent}(i) = j),\; p(\text{projective tree}) \propto e^{\sum_i e_{i, \mathrm{parent}(i)}}",
    ),
    "weights.hash-collisions": StepWording(
        Wording(
            "Attention weights: the chance that hashes by 2 hyperplanes are equal",
            "어텐션 가중치: 초평면 2개로 만든 해시가 같을 확률",
        ),
        "a_ij = (1 - arccos(e_ij) / π)²",
        r"a_{ij} = (1 - \arccos(e_{ij}) / \pi)^2",
    ),
    "weights.softpick": StepWording(
        Wording("Attention weights: softpick of each row", "어텐션 가중치: 행마다 소프트픽"),
        "a_ij = max(exp(e_ij) - 1, 0) / Σ_k |exp(e_ik) - 1|",
        r"a_{ij} = \frac{\max(e^{e_{ij}} - 1, 0)}{\sum_k \lvert e^{e_{ik}} - 1 \rvert}",
    ),
    "weights.relu": StepWording(
        Wording("Attention weights: positive scores over their sum", "어텐션 가중치: 양의 점수를 그 합으로 나눈 값"),
        "a_ij = max(e_ij, 0)^p / Σ_k max(e_ik, 0)^p",
        r"a_{ij} = \frac{\max(e_{ij}, 0)^p}{\sum_k \max(e_{ik}, 0)^p}",
    ),
    "linear_state": StepWording(
        Wording("State after position {}", "위치 {} 뒤의 상태"),
        "S_t = S_{t-1} + φ(k_t) v_tᵀ",
        r"S_t = S_{t-1} + \varphi(k_t) v_t^\top",
    ),
    "decayed_state": StepWording(
        Wording("State after position {}", "위치 {} 뒤의 상태"),
        "S_t = e^g S_{t-1} + φ(k_t) v_tᵀ",
        r"S_t = e^g S_{t-1} + \varphi(k_t) v_t^\top",
    ),
    "delta_state": StepWording(
        Wording("State after position {}", "위치 {} 뒤의 상태"),
        "S_t = S_{t-1} + β_t φ(k_t) (v_t - S_{t-1}ᵀ φ(k_t))ᵀ",
        r"S_t = S_{t-1} + \beta_t \varphi(k_t) (v_t - S_{t-1}^\top \varphi(k_t))^\top",
    ),
    "state_reading": StepWording(
        Wording("Context: what each query reads", "문맥 벡터: 질의가 상태에서 읽은 값"),
        "c_t = S_tᵀ φ(q_t)",
        r"c_t = S_t^\top \varphi(q_t)",
    ),
    "normalized_reading": StepWording(
        Wording("Context: what each query reads", "문맥 벡터: 질의가 상태에서 읽은 값"),
        "c_t = S_tᵀ φ(q_t) / (z_t · φ(q_t))",
        r"c_t = \frac{S_t^\top \varphi(q_t)}{z_t \cdot \varphi(q_t)}",
    ),
    # Random features, mixtures of keys
    "random_rows": StepWording(Wording("Random rows w", "무작위 행 w"), "w_r", "w_r"),
    "favor_query": StepWording(
        Wording("Random features of the queries", "질의의 무작위 특징"),
        "φ(q_i)_r = exp(w_r · q' - |q'|² / 2) / √m",
        r"\varphi(q_i)_r = \exp(w_r \cdot q' - |q'|^2 / 2) / \sqrt{m}",
    ),
    "favor_key": StepWording(
        Wording("Random features of the keys", "키의 무작위 특징"),
        "φ(k_j)_r = exp(w_r · k' - |k'|² / 2) / √m",
        r"\varphi(k_j)_r = \exp(w_r \cdot k' - |k'|^2 / 2) / \sqrt{m}",
    ),
    "mixing_matrix": StepWording(Wording("Projection along the length E", "길이 방향의 투영 행렬 E"), "E", "E"),
    "mixed_key": StepWording(Wording("Mixtures of keys", "섞은 키"), "E K", "E K"),
    "mixed_value": StepWording(Wording("Mixtures of values", "섞은 값"), "E V", "E V"),
    "mixture_weights": StepWording(
        Wording("Weight of each value", "값마다의 가중치"), "a_ij = Σ_r p_ir E_rj", r"a_{ij} = \sum_r p_{ir} E_{rj}"
    ),
    # Memories that are trained as they read
    "memory_error": StepWording(
        Wording(
            "Error at position {}: what the memory has for the key, less the value",
            "위치 {}의 오차: 기억이 키에 대해 내놓는 값에서 실제 값을 뺀 것",
        ),
        "W_{t-1}ᵀ k_t - v_t",
        r"W_{t-1}^\top k_t - v_t",
    ),
    "memory_step": StepWording(
        Wording(
            "Step at position {}: a part of the step before, less the gradient",
            "위치 {}의 갱신량: 이전 갱신량의 일부에서 경사를 뺀 것",
        ),
        "Z_t = η_t Z_{t-1} - θ_t k_t (W_{t-1}ᵀ k_t - v_t)ᵀ",
        r"Z_t = \eta_t Z_{t-1} - \theta_t k_t (W_{t-1}^\top k_t - v_t)^\top",
    ),
    "memory_state": StepWording(
        Wording("Memory after position {}", "위치 {} 뒤의 기억"),
        "W_t = e^g W_{t-1} + Z_t",
        "W_t = e^g W_{t-1} + Z_t",
    ),
    "memory_reading": StepWording(
        Wording("Context: what each query reads", "문맥 벡터: 질의가 기억에서 읽은 값"),
        "c_t = W_tᵀ q_t",
        r"c_t = W_t^\top q_t",
    ),
    "initial_model": StepWording(
        Wording("Weights W_0 before the first position", "첫 위치 앞의 가중치 W_0"), "W_0", "W_0"
    ),
    "model_product": StepWording(
        Wording("Position {}: the key times the weights", "위치 {}: 키에 가중치를 곱한 값"),
        "z_t = W_{t-1}ᵀ k_t",
        r"z_t = W_{t-1}^\top k_t",
    ),
    "model_normed": StepWording(
        Wording("Position {}: less the mean, over the deviation", "위치 {}: 평균을 빼고 표준편차로 나눈 값"),
        "LN(z_t) = (z_t - mean(z_t)) / √(variance of z_t + ε)",
        r"\mathrm{LN}(z_t) = \frac{z_t - \overline{z_t}}{\sqrt{\mathrm{variance}(z_t) + \varepsilon}}",
    ),
    "model_error": StepWording(
        Wording("Error at position {}: the prediction, less the value", "위치 {}의 오차: 예측에서 값을 뺀 것"),
        "δ_t = k_t + LN(z_t) - v_t",
        r"\delta_t = k_t + \mathrm{LN}(z_t) - v_t",
    ),
    "model_gradient": StepWording(
        Wording("Gradient of ½ |δ|² at position {}, through the norm", "위치 {}에서 ½ |δ|²의 경사: 정규화를 거친 것"),
        "g_t = (δ_t - mean(δ_t) - mean(δ_t LN(z_t)) LN(z_t)) / √(variance of z_t + ε)",
        r"g_t = \frac{\delta_t - \overline{\delta_t} - \overline{\delta_t \mathrm{LN}(z_t)}\, \mathrm{LN}(z_t)}"
        r"{\sqrt{\mathrm{variance}(z_t) + \varepsilon}}",
    ),
    "model": StepWording(
        Wording("Weights after position {}", "위치 {} 뒤의 가중치"),
        "W_t = W_{t-1} - θ_t k_t g_tᵀ",
        r"W_t = W_{t-1} - \theta_t k_t g_t^\top",
    ),
    "model_products": StepWording(
        Wording("Queries times the weights behind their position", "질의에 그 위치 뒤의 가중치를 곱한 값"),
        "W_tᵀ q_t",
        r"W_t^\top q_t",
    ),
    "model_reading": StepWording(
        Wording("Context: what the model makes of each query", "문맥 벡터: 모델이 질의마다 내놓는 값"),
        "c_t = q_t + LN(W_tᵀ q_t)",
        r"c_t = q_t + \mathrm{LN}(W_t^\top q_t)",
    ),
    # A state space
    "channel_parameters": StepWording(
        Wording("Step Δ, rate A, weight C and skip D", "간격 Δ, 변화율 A, 가중치 C, 건너뛰기 D"),
        "Δ, A, C, D",
        r"\Delta, A, C, D",
    ),
    "state_factor": StepWording(
        Wording("Factor of the state in one step: the bilinear rule", "한 단계에 상태에 곱하는 수: 쌍선형 규칙"),
        "Ā = (1 + ΔA/2) / (1 - ΔA/2)",
        r"\bar{A} = \frac{1 + \Delta A / 2}{1 - \Delta A / 2}",
    ),
    "input_factor": StepWording(
        Wording("Factor of the input", "입력에 곱하는 수"),
        "B̄ = Δ / (1 - ΔA/2)",
        r"\bar{B} = \frac{\Delta}{1 - \Delta A / 2}",
    ),
    "complex_state": StepWording(
        Wording("State after position {}", "위치 {} 뒤의 상태"),
        "h_t = Ā h_{t-1} + B̄ x_t",
        r"h_t = \bar{A} h_{t-1} + \bar{B} x_t",
    ),
    "outputs": StepWording(
        Wording("Output: read from the state", "출력: 상태에서 읽은 값"),
        "y_t = 2 Re(C h_t) + D x_t",
        r"y_t = 2\, \mathrm{Re}(C h_t) + D x_t",
    ),
    "kernel": StepWording(
        Wording("Kernel: what an input adds l positions later", "커널: 입력 하나가 l 위치 뒤에 더하는 값"),
        "K_l = 2 Re(C Ā^l B̄)",
        r"K_l = 2\, \mathrm{Re}(C \bar{A}^l \bar{B})",
    ),
    "convolution": StepWording(
        Wording("Output, the same as a convolution", "출력: 합성곱으로 계산한 같은 값"),
        "y_t = Σ_l K_l x_{t-l} + D x_t",
        r"y_t = \sum_l K_l x_{t-l} + D x_t",
    ),
    # Means of segments
    "landmarks": StepWording(
        Wording("Landmarks: the mean of each segment of queries", "랜드마크: 구간마다 질의의 평균"),
        "l_m = the mean of the queries of segment m",
        r"l_m = \mathrm{mean}_{i \in m}\, q_i",
    ),
    "landmark_kernel": StepWording(
        Wording("Kernel P of queries and landmarks", "질의와 랜드마크의 커널 P"),
        "P_im = exp(-|q_i - l_m|² / (2 √D))",
        r"P_{im} = e^{-|q_i - l_m|^2 / (2 \sqrt{D})}",
    ),
    "kernel_of_landmarks": StepWording(
        Wording("Kernel A of the landmarks", "랜드마크끼리의 커널 A"),
        "A_mn = exp(-|l_m - l_n|² / (2 √D))",
        r"A_{mn} = e^{-|l_m - l_n|^2 / (2 \sqrt{D})}",
    ),
    "inverse_kernel": StepWording(Wording("Inverse of A", "A의 역행렬"), "A⁻¹", "A^{-1}"),
    "gathered_values": StepWording(
        Wording("What each landmark gathers of the values", "랜드마크마다 모은 값"), "Pᵀ V", r"P^\top V"
    ),
    "mixed_values": StepWording(
        Wording("The same, without what landmarks share", "랜드마크가 함께 모은 몫을 뺀 값"),
        "A⁻¹ Pᵀ V",
        r"A^{-1} P^\top V",
    ),
    "landmark_context": StepWording(
        Wording("Context: what each query reads of the landmarks", "문맥 벡터: 질의가 랜드마크에서 읽은 값"),
        "P (A⁻¹ Pᵀ V)",
        r"P (A^{-1} P^\top V)",
    ),
    "landmark_weights": StepWording(
        Wording("Weight of each value, which is never computed", "값마다의 가중치: 실제로는 계산하지 않습니다"),
        "P A⁻¹ Pᵀ",
        r"P A^{-1} P^\top",
    ),
    "gaussian_weights": StepWording(
        Wording("Without landmarks: the kernel of all pairs", "랜드마크가 없을 때: 모든 쌍의 커널"),
        "a_ij = exp(-|q_i - q_j|² / (2 √D))",
        r"a_{ij} = e^{-|q_i - q_j|^2 / (2 \sqrt{D})}",
    ),
    "gaussian_context": StepWording(
        Wording("Without landmarks: the context", "랜드마크가 없을 때: 문맥 벡터"),
        "c_i = Σ_j exp(-|q_i - q_j|² / (2 √D)) v_j",
        r"c_i = \sum_j e^{-|q_i - q_j|^2 / (2 \sqrt{D})} v_j",
    ),
    # Samples of LARA
    "query_means": StepWording(
        Wording("Mean of each segment of queries", "구간마다 질의의 평균"),
        "q̃_c = the mean of the queries of segment c",
        r"\tilde{q}_c = \mathrm{mean}_{i \in c}\, q_i",
    ),
    "key_means": StepWording(
        Wording("Mean of each segment of keys", "구간마다 키의 평균"),
        "k̃_c = the mean of the keys of segment c",
        r"\tilde{k}_c = \mathrm{mean}_{j \in c}\, k_j",
    ),
    "samples": StepWording(Wording("Samples ω", "표본 ω"), "ω_c = q̃_c + k̃_c", r"\omega_c = \tilde{q}_c + \tilde{k}_c"),
    "sample_exponentials": StepWording(
        Wording("Each sample's features of the keys", "표본마다 키의 특징"),
        "exp(ω_c · k_j - |k_j|² / 2)",
        r"\exp(\omega_c \cdot k_j - |k_j|^2 / 2)",
    ),
    "sample_weights": StepWording(
        Wording("Weights of each sample: its features over their sum", "표본마다의 가중치: 특징을 그 합으로 나눈 값"),
        "s_cj = exp(ω_c · k_j - |k_j|² / 2) / L_c, L_c the sum over j",
        r"s_{cj} = e^{\omega_c \cdot k_j - |k_j|^2 / 2} / L_c, \; L_c = \sum_j e^{\omega_c \cdot k_j - |k_j|^2 / 2}",
    ),
    "sample_contexts": StepWording(
        Wording("What each sample reads of the values", "표본마다 읽은 값"),
        "r_c = Σ_j s_cj v_j",
        r"r_c = \sum_j s_{cj} v_j",
    ),
    "nearness": StepWording(
        Wording("How near each query is to each segment", "질의가 구간마다 가까운 정도"),
        "t_ic = exp(q_i · q̃_c) / Σ_m exp(q_i · q̃_m)",
        r"t_{ic} = \frac{\exp(q_i \cdot \tilde{q}_c)}{\sum_m \exp(q_i \cdot \tilde{q}_m)}",
    ),
    "sample_densities": StepWording(
        Wording(
            "How likely each sample is by its own distribution, among all",
            "표본이 다른 분포가 아닌 제 분포에서 나올 비율",
        ),
        "b_c = 1 / Σ_m exp(-|ω_c - ω_m|² / 2)",
        r"b_c = \frac{1}{\sum_m e^{-|\omega_c - \omega_m|^2 / 2}}",
    ),
    "sample_factors": StepWording(
        Wording("Factor of each sample for each query", "질의마다 표본에 곱하는 수"),
        "α_ic = b_c + t_ic - the mean of t_i",
        r"\alpha_{ic} = b_c + t_{ic} - \mathrm{mean}_m\, t_{im}",
    ),
    "sample_parts": StepWording(
        Wording("Parts of the samples", "표본마다의 부분"),
        "u_ic = α_ic exp(ω_c · q_i - |ω_c|² / 2) L_c",
        r"u_{ic} = \alpha_{ic} \exp(\omega_c \cdot q_i - |\omega_c|^2 / 2) L_c",
    ),
    "sample_shares": StepWording(
        Wording("Share of each sample: its part over their sum", "표본마다의 몫: 부분을 그 합으로 나눈 값"),
        "p_ic = u_ic / Σ_m u_im",
        r"p_{ic} = \frac{u_{ic}}{\sum_m u_{im}}",
    ),
    "sample_mixture": StepWording(
        Wording("Context: what the samples read, by their shares", "문맥 벡터: 표본이 읽은 값을 몫으로 섞은 것"),
        "c_i = Σ_c p_ic r_c",
        r"c_i = \sum_c p_{ic} r_c",
    ),
    "sample_mixture_weights": StepWording(
        Wording("Weight of each value, which is never computed", "값마다의 가중치: 실제로는 계산하지 않습니다"),
        "a_ij = Σ_c p_ic s_cj",
        r"a_{ij} = \sum_c p_{ic} s_{cj}",
    ),
    # Blocks of keys
    "online_shrink": StepWording(
        Wording("Factor of what was summed before tile {}", "타일 {} 앞에서 더한 것에 곱하는 수"),
        "exp(m_old - m)",
        r"\exp(m_\mathrm{old} - m)",
    ),
    "online_exponentials": StepWording(
        Wording("Exponentials of tile {}", "타일 {}의 지수 함수값"), "exp(e_ij - m_i)", r"\exp(e_{ij} - m_i)"
    ),
    "online_state": StepWording(
        Wording("Maximum m, total l and sum o after tile {}", "타일 {} 뒤의 최댓값 m, 총합 l, 가중합 o"),
        "m = max e, l = Σ exp(e - m), o = Σ exp(e - m) v",
        r"m = \max_j e_{ij}, \; l = \sum_j \exp(e_{ij} - m), \; o = \sum_j \exp(e_{ij} - m) v_j",
    ),
    "online_context": StepWording(Wording("Context", "문맥 벡터(어텐션 값)"), "c_i = o_i / l_i", "c_i = o_i / l_i"),
    "online_lse": StepWording(Wording("Log-sum-exp", "로그합지수(log-sum-exp)"), "m_i + log l_i", r"m_i + \log l_i"),
    "log_sum_exp": StepWording(
        Wording("Log-sum-exp", "로그합지수(log-sum-exp)"), "log Σ_j exp(e_ij)", r"\log \sum_j \exp e_{ij}"
    ),
    "weights_again": StepWording(
        Wording("Weights, computed again for the backward pass", "역전파에서 다시 계산한 가중치"),
        "a_ij = exp(e_ij - lse_i)",
        r"a_{ij} = \exp(e_{ij} - \mathrm{lse}_i)",
    ),
    "merged_lse": StepWording(
        Wording("Log-sum-exp of all blocks", "모든 블록의 로그합지수"),
        "lse = log Σ_p exp(lse_p)",
        r"\mathrm{lse} = \log \sum_p \exp \mathrm{lse}_p",
    ),
    "merge_shares": StepWording(
        Wording("Share of each block", "블록마다의 몫"), "exp(lse_p - lse)", r"\exp(\mathrm{lse}_p - \mathrm{lse})"
    ),
    "merged_context": StepWording(
        Wording("Context, merged", "합친 문맥 벡터"),
        "c_i = Σ_p exp(lse_p - lse) c_p",
        r"c_i = \sum_p \exp(\mathrm{lse}_p - \mathrm{lse}) \, c_{i,p}",
    ),
    # Local attention
    "centre_projection": StepWording(
        Wording("Matrix W_p of the window's centre", "창의 중심을 예측하는 가중치 행렬 W_p"), "W_p", "W_p"
    ),
    "centre_vector": StepWording(Wording("Vector v_p", "벡터 v_p"), "v_p", "v_p"),
    "centre": StepWording(
        Wording("Predicted centre of the window", "예측한 창의 중심"),
        "p_t = S · sigmoid(v_p · tanh(W_p s_t))",
        r"p_t = S \,\mathrm{sigmoid}(v_p^\top \tanh(W_p s_t))",
    ),
    # Translation
    "source_embedding": StepWording(Wording("Embeddings of the source", "원문 단어의 임베딩"), "E x_j", "E x_j"),
    "annotations": StepWording(
        Wording("Encoder states h: keys and values", "인코더 은닉 상태 h: 키와 값"),
        "h_j = [→h_j; ←h_j]",
        r"h_j = [\overrightarrow{h}_j; \overleftarrow{h}_j]",
    ),
    "target_embedding": StepWording(
        Wording("Embedding of the previous word", "이전 단어의 임베딩"), "E y_{t-1}", r"E y_{t-1}"
    ),
    "decoder_state": StepWording(
        Wording("Decoder state s_t: the query", "디코더 은닉 상태 s_t: 질의"),
        "s_t = cell(E y_{t-1}, s_{t-1})",
        r"s_t = \mathrm{cell}(E y_{t-1}, s_{t-1})",
    ),
    "previous_state": StepWording(
        Wording("Decoder state s_{t-1}: the query", "이전 디코더 은닉 상태 s_{t-1}: 질의"), "s_{t-1}", "s_{t-1}"
    ),
    "cell_input": StepWording(
        Wording("Concatenation: input of the cell", "연결: 셀의 입력"), "[E y_{t-1}; c_t]", r"[E y_{t-1}; c_t]"
    ),
    "next_state": StepWording(
        Wording("Decoder state s_t", "디코더 은닉 상태 s_t"),
        "s_t = cell([E y_{t-1}; c_t], s_{t-1})",
        r"s_t = \mathrm{cell}([E y_{t-1}; c_t], s_{t-1})",
    ),
    "cell_projection": StepWording(
        Wording("Matrix W_n of the cell's candidate", "셀의 후보 상태를 만드는 가중치 행렬 W_n"), "W_n", "W_n"
    ),
    "readout": StepWording(
        Wording("Features of the prediction: maxout", "예측에 쓰는 특징: maxout"),
        "maxout(W [s_t; E y_{t-1}; c_t])",
        r"\mathrm{maxout}(W [s_t; E y_{t-1}; c_t])",
    ),
    "concatenated": StepWording(Wording("Concatenation", "연결"), "[c_t; s_t]", "[c_t; s_t]"),
    "attentional_projection": StepWording(
        Wording("Matrix W_c of the attentional vector", "s̃를 만드는 가중치 행렬 W_c"), "W_c", "W_c"
    ),
    "prediction_projection": StepWording(
        Wording("Matrix W_s of the prediction, a row for each word", "예측의 가중치 행렬 W_s: 단어마다 한 행"),
        "W_s",
        "W_s",
    ),
    "attentional": StepWording(
        Wording("Attentional vector s̃_t", "어텐셔널 은닉 상태 s̃_t"),
        "s̃_t = tanh(W_c [c_t; s_t])",
        r"\tilde{s}_t = \tanh(W_c [c_t; s_t])",
    ),
    "coverage": StepWording(
        Wording("Coverage: the weights of the steps before, summed", "커버리지: 앞 단계들의 가중치를 더한 합"),
        "c_tj = Σ_{t' < t} a_t'j, and B_tj = v tanh(W s + U h_j + u c_tj) - v tanh(W s + U h_j)",
        r"c_{tj} = \sum_{t' < t} a_{t'j}, \; B_{tj} = v \tanh(W s + U h_j + u c_{tj}) - v \tanh(W s + U h_j)",
    ),
    "fertility": StepWording(
        Wording(
            "Fertility: target words that a source word is read for", "비옥도: 원문 단어 하나를 읽을 번역 단어의 수"
        ),
        "Φ_j = N σ(u_f · h_j), and the score reads c_tj / Φ_j",
        r"\Phi_j = N \sigma(u_f \cdot h_j), \text{ and the score reads } c_{tj} / \Phi_j",
    ),
    "generation": StepWording(
        Wording("Probability of saying a word rather than copying one", "복사하지 않고 단어를 말할 확률"),
        "p_gen = σ(W [c_t; s_t; E y_{t-1}] + b)",
        r"p_{\mathrm{gen}} = \sigma(W [c_t; s_t; E y_{t-1}] + b)",
    ),
    "mixed_prediction": StepWording(
        Wording(
            "Prediction: the most probable next words, said or copied",
            "예측: 말하거나 복사할 확률이 가장 높은 다음 단어",
        ),
        "P(w) = p_gen softmax(W x_t)_w + (1 - p_gen) Σ_{j: x_j = w} a_tj",
        r"P(w) = p_{\mathrm{gen}} \, \mathrm{softmax}(W x_t)_w + (1 - p_{\mathrm{gen}}) \sum_{j: x_j = w} a_{tj}",
    ),
    "decoder_features": StepWording(Wording("Output of the last layer", "마지막 층의 출력"), "x_t", "x_t"),
    "prediction": StepWording(
        Wording("Prediction: the most probable next words", "예측: 가장 확률이 높은 다음 단어"),
        "P(y_t) = softmax(W x_t)",
        r"P(y_t) = \mathrm{softmax}(W x_t)",
    ),
}
