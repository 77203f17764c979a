"""Rules about dropout of weights, and about the precision of the softmax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..finding import Severity
from ..symbolic_evaluation import Event, ModuleFacts
from ..term import Term, is_none, is_true, label, number, walk
from .base import Report, formulas, function_around, rule

_HALF = ("torch.float16", "torch.half", "torch.bfloat16")


@rule(
    "ATT301",
    Severity.ERROR,
    source="https://github.com/pytorch/pytorch/issues/124464",
    wrong="""
        class Attention(nn.Module):
            def __init__(self, dropout=0.1):
                super().__init__()
                self.dropout = dropout

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
    """,
    right="""
        class Attention(nn.Module):
            def __init__(self, dropout=0.1):
                super().__init__()
                self.dropout = dropout

            def forward(self, q, k, v):
                p = self.dropout if self.training else 0.0
                return F.scaled_dot_product_attention(q, k, v, dropout_p=p)
    """,
)
def dropout_in_evaluation(facts: ModuleFacts) -> Iterator[Report]:
    """Dropout of the weights stays on in evaluation.

    The functions `scaled_dot_product_attention` and `F.dropout` know nothing of `model.eval()`: the first drops with
    whatever probability it is passed, the second does so unless `training=False`. Predictions become random. Pass 0
    unless `self.training`.
    """
    for event in facts.operations("sdpa"):
        probability = event.term.get("dropout_p")
        if probability is not None and _is_always_on(probability, event):
            yield Report(
                probability.node if isinstance(probability.node, ast.expr) else event.term.node,
                "dropout_p does not depend on self.training, so dropout stays on in evaluation: "
                "pass `p if self.training else 0.0`",
            )
    for site in formulas(facts):
        for step in site.after:
            functional = step.op == "dropout" and str(step.term.value).endswith("functional.dropout")
            training = step.term.get("training")
            if functional and (training is None or is_true(training)) and number(step.term.get("p")) != 0:
                yield Report(
                    step.term.node,
                    "F.dropout without training=self.training drops weights in evaluation too",
                )


def _is_always_on(probability: Term, event: Event) -> bool:
    """Whether a probability is a number, or an attribute that holds one, whatever the mode of the model is."""
    if any(label(one) == "training" for one in walk(probability)) or probability.op == "choice":
        return False
    plain = number(probability)
    if plain is not None:
        return plain > 0
    if probability.op == "parameter":
        constructor = event.class_.methods.get("__init__") if event.class_ is not None else None
        return constructor is not None and any(probability.node is one for one in ast.walk(constructor.args))
    if probability.op == "attribute":
        base = probability.input
        if probability.value == "p" and base.op in ("call", "self", "attribute"):
            return True
        return base.op == "parameter" and label(base) in ("config", "cfg", "args", "hparams", "opt")
    return False


@rule(
    "ATT302",
    Severity.ERROR,
    source="https://github.com/NVIDIA/Megatron-LM/pull/411",
    wrong="""
        class Attention(nn.Module):
            def __init__(self, dropout):
                super().__init__()
                self.dropout = dropout

            def forward(self, q, k, v):
                if not self.training:
                    self.dropout = 0.0
                return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
    """,
    right="""
        class Attention(nn.Module):
            def __init__(self, dropout):
                super().__init__()
                self.dropout = dropout

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
    """,
)
def dropout_off_for_ever(facts: ModuleFacts) -> Iterator[Report]:
    """A call in evaluation sets the probability of dropout to 0, and nothing sets it back.

    Training goes on without dropout after the first evaluation. Choose the probability at each call, by
    `self.training`.
    """
    for node in facts.nodes[ast.Assign]:
        target = node.targets[0]
        if not isinstance(target, ast.Attribute) or not isinstance(node.value, ast.Constant) or node.value.value != 0:
            continue
        written = ast.unparse(target)
        if not re.match(r"self\.", written) or not re.search(r"drop(out)?(_p|_prob|_rate)?$|dropout\w*\.p$", written):
            continue
        function = function_around(node, facts)
        if function is None or function.name == "__init__":
            continue
        others = [one for one in facts.nodes[ast.Assign] if one is not node and ast.unparse(one.targets[0]) == written]
        if all(getattr(function_around(one, facts), "name", "") == "__init__" for one in others):
            yield Report(
                node, f"`{written}` stays 0 after the first evaluation: choose it by self.training at each call"
            )


@rule(
    "ATT311",
    Severity.WARNING,
    source="https://github.com/huggingface/transformers/pull/29285",
    wrong="""
        def attention(q, k, v):
            scores = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).half()
            return torch.softmax(scores, dim=-1) @ v
    """,
    right="""
        def attention(q, k, v):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
    """,
)
def softmax_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax of scores is computed in half precision.

    Sums of thousands of exponentials in float16 or bfloat16 lose the small weights, and float16 overflows at scores
    above 65504. Pass `dtype=torch.float32`, and convert the weights afterwards.
    """
    for site in formulas(facts):
        if site.softmax is None:
            continue
        dtype = site.softmax.get("dtype")
        if is_none(dtype):
            casts = [step.term.get("dtype") for step in site.before if step.op == "cast" and not step.conditional]
            dtype = casts[-1] if casts else None
        if dtype is not None and dtype.op == "name" and dtype.value in _HALF:
            name = str(dtype.value).removeprefix("torch.")
            yield Report(site.softmax.node, f"softmax of scores in {name}: pass dtype=torch.float32")
