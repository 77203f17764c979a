"""Explanations of what `regard examine` finds: what each code means, a wrong and a right example, and its source."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from .finding import Severity

KINDS: dict[str, tuple[str, Severity]] = {
    "RUN101": ("future leak", Severity.ERROR),
    "RUN102": ("document leak", Severity.ERROR),
    "RUN103": ("padding leak", Severity.ERROR),
    "RUN104": ("left padding changes results", Severity.ERROR),
    "RUN105": ("right padding changes results", Severity.ERROR),
    "RUN106": ("positions ignored", Severity.ERROR),
    "RUN107": ("batch leak", Severity.ERROR),
    "RUN108": ("window not applied", Severity.WARNING),
    "RUN109": ("positions that never mix", Severity.WARNING),
    "RUN110": ("row that attends to nothing", Severity.ERROR),
    "RUN111": ("saturated softmax", Severity.HINT),
    "RUN112": ("dead head", Severity.HINT),
    "RUN113": ("duplicate heads", Severity.HINT),
    "RUN114": ("sink-only head", Severity.HINT),
    "RUN115": ("scores not scaled by 1/√d", Severity.WARNING),
    "RUN116": ("rotary positions that are not relative", Severity.WARNING),
    "RUN117": ("weights that do not sum to 1", Severity.WARNING),
    "RUN118": ("mask that scores can reach", Severity.WARNING),
    "RUN119": ("softmax in half precision", Severity.WARNING),
    "RUN120": ("prefill and decode disagree", Severity.ERROR),
    "RUN121": ("backends differ", Severity.ERROR),
    "RUN122": ("training and evaluation differ", Severity.ERROR),
    "RUN123": ("random in evaluation", Severity.ERROR),
    "RUN124": ("options change results", Severity.ERROR),
    "RUN125": ("evaluation changes the model", Severity.ERROR),
    "RUN130": ("sparse mask, dense cost", Severity.HINT),
    "RUN131": ("eager attention", Severity.HINT),
}
"""By code, the name of what `regard examine` finds, and its severity."""


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """One kind of fault of a running model; `wrong` and `right` are empty where no few lines show it."""

    text: str
    source: str
    wrong: str = ""
    right: str = ""


def _code(text: str) -> str:
    return inspect.cleandoc(text)


_TRANSFORMERS = "https://github.com/huggingface/transformers"

EXPLANATIONS: dict[str, RunExplanation] = {
    "RUN101": RunExplanation(
        "An output moves when a later token changes. In training such a model copies the answer, and its loss is far "
        "too low; in generation there is no later token, and it fails.\n\nThe map shows the influence of each token on "
        "each output: above the diagonal it has to be empty. The module named is the first whose output moves though "
        "its inputs do not.",
        f"{_TRANSFORMERS}/issues/48745; {_TRANSFORMERS}/issues/31673; https://github.com/karpathy/nanochat/issues/844",
        _code("""
            weights = (q @ k.mT / d**0.5).softmax(-1)
        """),
        _code("""
            future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
            weights = (q @ k.mT / d**0.5).masked_fill(future, -torch.inf).softmax(-1)
        """),
    ),
    "RUN102": RunExplanation(
        "Documents are packed into one sequence, and the outputs of one move when the one before it changes. Restarted "
        "positions alone do not separate documents: the mask has to.\n\nIn the map, the block of the second "
        "document's outputs and the first one's tokens has to be empty.",
        f"{_TRANSFORMERS}/pull/46634; https://github.com/huggingface/trl/pull/6843",
        _code("""
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        """),
        _code("""
            same = documents[:, None, :, None] == documents[:, None, None, :]
            causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            out = scaled_dot_product_attention(q, k, v, attn_mask=same & causal)
        """),
    ),
    "RUN103": RunExplanation(
        "The padding mask says that some tokens do not exist, and outputs of the others depend on what they are. The "
        "mask is dropped on the way, inverted, or lies along the wrong axis; or a mean, a convolution or a norm runs "
        "over padding.\n\nIn the map the columns of the padding have to be empty.",
        f"https://github.com/hyunwoongko/transformer/pull/40; {_TRANSFORMERS}/pull/47946",
        _code("""
            keep = padding_mask[:, None, :, None]  # (batch, 1, queries, 1): hides queries
        """),
        _code("""
            keep = padding_mask[:, None, None, :]  # (batch, 1, 1, keys): hides keys
        """),
    ),
    "RUN104": RunExplanation(
        "Masked padding on the left gives other outputs than the same text without padding, as batched generation "
        "needs it. Mostly positions count the padding.",
        "https://github.com/unslothai/unsloth/pull/4078",
        _code("""
            positions = torch.arange(ids.shape[1])
        """),
        _code("""
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        """),
    ),
    "RUN105": RunExplanation(
        "Masked padding on the right gives other outputs than the same text without padding, though no content of the "
        "padding matters: something depends on the padded length, such as a position counted from the end, a mean "
        "over all positions, or a chunked pattern.",
        f"{_TRANSFORMERS}/pull/47946",
    ),
    "RUN106": RunExplanation(
        "Permuted tokens give permuted outputs: the model cannot tell `a b` from `b a`. Positional embeddings, rotary "
        "positions or a bias by distance are missing, or are added where they have no effect. A causal mask alone "
        "gives later layers some order, and the first layer none.",
        "Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762",
        _code("""
            x = self.embedding(ids)
        """),
        _code("""
            x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        """),
    ),
    "RUN107": RunExplanation(
        "The outputs of one row of the batch move when other rows change. Often a module that expects (length, batch, "
        "dim) was called with (batch, length, dim), or statistics of the batch are used in evaluation.",
        "https://github.com/DaoyuanLi2816/Molecule-Generator/pull/22",
        _code("""
            attention = nn.MultiheadAttention(dim, heads)
        """),
        _code("""
            attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        """),
    ),
    "RUN108": RunExplanation(
        "A module states a window and attends farther: most outputs beyond the window move when one position changes. "
        "The mask of the window is built and not passed, has one side only, or the number is stored and never read.",
        f"{_TRANSFORMERS}/issues/39408; https://github.com/proger/hippogriff/issues/7",
        _code("""
            keep = i - j < window  # the whole future, too
        """),
        _code("""
            keep = (j <= i) & (i - j < window)
        """),
    ),
    "RUN109": RunExplanation(
        "The model has a softmax, and no output depends on another position of the sequence: attention runs over "
        "another axis, such as the batch, the heads, or the other side of a picture.",
        "https://github.com/DaoyuanLi2816/Molecule-Generator/pull/22",
        _code("""
            attention = nn.MultiheadAttention(dim, heads)  # x is (batch, length, dim)
        """),
        _code("""
            attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        """),
    ),
    "RUN110": RunExplanation(
        "A query of a real token has no key that it may attend to. The softmax of a row of -inf is NaN, which spreads "
        "through values and norms; of a row of one finite number it is the mean of all values, masked ones too.",
        "https://github.com/pytorch/pytorch/issues/103749",
    ),
    "RUN111": RunExplanation(
        "In most rows of a head one weight is 1 to rounding, so that its softmax has no gradient, and the head cannot "
        "learn to attend elsewhere. Scores are too large: the scale 1/√d is missing, or weights have grown.",
        "Vaswani et al. 2017, section 3.2.1, https://arxiv.org/abs/1706.03762",
    ),
    "RUN112": RunExplanation(
        "All weights of a row are equal in every row of a head, whatever the input: it computes a mean. Its query or "
        "key projection is zero, or a scale of 0 was passed.",
        "https://github.com/SKaiNET-developers/SKaiNET/pull/880",
    ),
    "RUN113": RunExplanation(
        "Two heads have the same weights for every input, and one of them is wasted. Heads were initialised alike, "
        "copied, or indexed twice.",
        "Michel et al. 2019, https://arxiv.org/abs/1905.10650",
    ),
    "RUN114": RunExplanation(
        "Every row of a head puts its weight on the first key. Trained models have such heads, to do nothing; they "
        "cost as much as others, and a cache that evicts the first token breaks them.",
        "Xiao et al. 2023, https://arxiv.org/abs/2309.17453",
    ),
    "RUN115": RunExplanation(
        "Dot products of vectors of length d reach the softmax with another factor than 1/√d. Without it the weights "
        "saturate as d grows; with it twice, or with the width of the model for d, they are nearly uniform. Some "
        "models are published so, as T5, whose weights are trained for it.",
        "Vaswani et al. 2017, section 3.2.1, https://arxiv.org/abs/1706.03762; https://github.com/delzac/cntkx/issues/10",
        _code("""
            weights = (q @ k.mT).softmax(-1)
        """),
        _code("""
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        """),
    ),
    "RUN116": RunExplanation(
        "With one vector at all positions, rotary attention has scores that depend on more than distance, or values "
        "that depend on the position. The table of angles is for neighbouring pairs and the rotation for halves, or "
        "the values are rotated, too.",
        "Su et al. 2021, section 3.2.2, https://arxiv.org/abs/2104.09864; "
        "https://github.com/raiyanyahya/how-to-train-your-gpt/issues/6",
        _code("""
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
            rotated = x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
        """),
        _code("""
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            rotated = x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
        """),
    ),
    "RUN117": RunExplanation(
        "The weights that multiply the values do not sum to 1 over them: the softmax ran over another axis, over one "
        "of length 1, or the weights were scaled or masked afterwards.",
        "https://github.com/FrancescoSaverioZuppichini/ViT/issues/2; https://github.com/PetrochukM/PyTorch-NLP/issues/2",
        _code("""
            weights = scores.softmax(-2)
        """),
        _code("""
            weights = scores.softmax(-1)
        """),
    ),
    "RUN118": RunExplanation(
        "Masked scores are a finite number that other scores can reach. A network that gains by it learns scores as "
        "low, and attends to what is masked.",
        "https://github.com/karpathy/minGPT/issues/75; https://github.com/facebookresearch/fairseq/issues/3575",
        _code("""
            scores = scores.masked_fill(~keep, -1e4)
        """),
        _code("""
            scores = scores.masked_fill(~keep, -torch.inf)
        """),
    ),
    "RUN119": RunExplanation(
        "The softmax of the scores is computed in half precision, whose sums over many keys lose the small weights.",
        f"{_TRANSFORMERS}/pull/29285",
        _code("""
            weights = scores.softmax(-1)  # scores are float16
        """),
        _code("""
            weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        """),
    ),
    "RUN120": RunExplanation(
        "A sequence in chunks, or token by token, with a cache gives other outputs than at once. The causal mask "
        "starts at the first key instead of the last, a chunk after the first has no mask, or positions start again.",
        "https://github.com/pytorch/pytorch/issues/108108; https://github.com/Mikyx-1/TinyLLM/pull/18",
        _code("""
            out = scaled_dot_product_attention(q, k, v, is_causal=True)  # keys of a cache stand before q
        """),
        _code("""
            keep = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)
            out = scaled_dot_product_attention(q, k, v, attn_mask=keep)
        """),
    ),
    "RUN121": RunExplanation(
        "The same weights give other outputs under another attention implementation of transformers, by more than "
        "rounding: one of them drops a mask, a softcap, sinks or a bias.",
        f"{_TRANSFORMERS}/issues/48748; https://github.com/sgl-project/sglang/issues/33915",
    ),
    "RUN122": RunExplanation(
        "With every dropout 0, train() and eval() give different outputs: two code paths compute different attention, "
        "such as a fast path in evaluation that drops a mask.",
        "https://github.com/pytorch/pytorch/issues/86120",
    ),
    "RUN123": RunExplanation(
        "In evaluation the outputs depend on the random seed: a dropout is active, mostly one that a function is "
        "called with.",
        "https://github.com/pytorch/pytorch/issues/124464",
        _code("""
            out = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        """),
        _code("""
            out = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        """),
    ),
    "RUN124": RunExplanation(
        "Returning the weights, or a mask that hides nothing, changes the outputs: the path that does so drops the "
        "causal mask or another part of the formula.",
        "https://github.com/keras-team/keras/issues/23038; https://github.com/facebookresearch/xformers/issues/103",
        _code("""
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)  # the causal mask is in the other branch alone
        """),
        _code("""
            causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask & causal)
        """),
    ),
    "RUN125": RunExplanation(
        "A call in evaluation changes a dropout of the model: training after the first evaluation has another one.",
        "https://github.com/NVIDIA/Megatron-LM/pull/411",
        _code("""
            if not self.training:
                self.dropout = 0.0
        """),
        _code("""
            dropout = self.dropout if self.training else 0.0
        """),
    ),
    "RUN130": RunExplanation(
        "The mask leaves a number of pairs that grows like the length, and all pairs are computed, which grow like its "
        "square. FlexAttention with a block mask, or regard.attention with a structured mask, computes those that "
        "exist.",
        "https://github.com/pytorch/pytorch/issues/119653",
        _code("""
            out = scaled_dot_product_attention(q, k, v, attn_mask=band)
        """),
        _code("""
            out = regard.attention(q, k, v, mask=causal() & window(before=128))
        """),
    ),
    "RUN131": RunExplanation(
        "Attention is computed eagerly, with all weights in memory, and another implementation that the model can "
        "select is faster here.",
        "https://huggingface.co/docs/transformers/attention_interface",
        _code("""
            model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")
        """),
        _code("""
            model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")
        """),
    ),
}
"""By code, what a finding of `regard.doctor.examine` means."""
