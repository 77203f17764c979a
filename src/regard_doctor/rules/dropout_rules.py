"""Rules about dropout of weights, and about the precision of the softmax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import dtype_of_projection
from ..finding import Severity
from ..module_facts import Event, ModuleFacts
from ..term import HALF, Term, is_none, label, number, walk
from .base import Report, default_of, formulas, function_around, last_name, rule, tests_around


@rule("ATT301", Severity.ERROR)
def dropout_in_evaluation(facts: ModuleFacts) -> Iterator[Report]:
    """Dropout of the weights, or of what attention reads, stays on in evaluation."""
    for event in facts.operations("sdpa"):
        probability = event.term.get("dropout_p")
        if probability is not None and _is_always_on(probability, event) and not _is_tested_for_none(event, facts):
            yield Report(
                event.term.node,
                "dropout_p does not depend on self.training, so dropout stays on in evaluation: "
                "pass `p if self.training else 0.0`",
            )
    attending = {event.caller or event.class_ or event.function for event in facts.operations("softmax", "sdpa")}
    for event in facts.operations("dropout") if facts.sites else ():
        if (event.class_ or event.function) not in attending:
            continue
        functional = str(event.term.value).endswith("functional.dropout")
        written_out = event.term.get("training") is not None  # training=True is on purpose
        if functional and not written_out and not _is_chosen_elsewhere(event, facts):
            yield Report(event.term.node, "F.dropout without training=self.training drops in evaluation too")


def _is_tested_for_none(event: Event, facts: ModuleFacts) -> bool:
    """Whether a call is made only without dropout: by a condition, or by an attribute that is true only then."""
    attributes = event.class_.attributes if event.class_ is not None else {}
    for test in tests_around(event.term.node, facts):
        for node in ast.walk(test):
            value = attributes.get(node.attr) if isinstance(node, ast.Attribute) else None
            written = ast.unparse(value.node) if value is not None and isinstance(value.node, ast.expr) else ""
            if re.search(r"drop\w*(\.p)? == 0|not [\w.]*drop", f"{ast.unparse(node)} {written}"):
                return True
    return False


def _is_chosen_elsewhere(event: Event, facts: ModuleFacts) -> bool:
    """Whether the probability may be 0 in evaluation: the caller passes it, a branch sets it, or a test is around."""
    probability = event.term.get("p")
    if probability is not None and (number(probability) == 0 or probability.op == "choice"):
        return True
    if probability is not None and probability.op == "parameter" and _is_of_caller(probability, facts):
        return True
    return any(map(_is_other_condition, tests_around(event.term.node, facts)))


def _is_other_condition(test: ast.expr) -> bool:
    """Whether a condition depends on something else than whether there is dropout at all."""
    names = {last_name(node) for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)}
    return any("drop" not in name and name not in ("self", "config", "p") for name in names) or any(
        re.search(r"switch|training", name) for name in names
    )


def _is_of_caller(parameter: Term, facts: ModuleFacts) -> bool:
    """Whether each call of a function passes a probability, 0 unless it does; a constructor keeps it for all calls."""
    function = function_around(parameter.node, facts)
    if function is None or function.name == "__init__":
        return False
    default = default_of(parameter, facts)
    return not (isinstance(default, ast.Constant) and isinstance(default.value, float | int) and default.value > 0)


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


@rule("ATT302", Severity.ERROR)
def dropout_off_for_ever(facts: ModuleFacts) -> Iterator[Report]:
    """A call in evaluation sets the probability of dropout to 0, and nothing sets it back."""
    for node in facts.nodes[ast.Assign]:
        target = node.targets[0]
        if not isinstance(target, ast.Attribute) or not isinstance(node.value, ast.Constant) or node.value.value != 0:
            continue
        written = ast.unparse(target)
        if not re.match(r"self\.", written) or not re.search(r"drop(out)?(_p|_prob|_rate)?$|dropout\w*\.p$", written):
            continue
        function = function_around(node, facts)
        if (
            function is None
            or function.name == "__init__"
            or not re.search(r"self\.training|\.eval\(", ast.unparse(function))
        ):
            continue
        others = [one for one in facts.nodes[ast.Assign] if one is not node and ast.unparse(one.targets[0]) == written]
        if all(getattr(function_around(one, facts), "name", "") == "__init__" for one in others):
            yield Report(
                node, f"`{written}` stays 0 after the first evaluation: choose it by self.training at each call"
            )


@rule("ATT303", Severity.WARNING)
def evaluation_in_training_mode(facts: ModuleFacts) -> Iterator[Report]:
    """A function evaluates a model that nothing in the file switches to evaluation."""
    if not facts.sites or ".eval()" in facts.source or ".train(False)" in facts.source:
        return
    if "ropout" not in facts.source:
        return
    for function in facts.nodes[ast.FunctionDef]:
        parameters = {one.arg for one in function.args.args}
        if not re.match(r"^(evaluate|validate|validation|estimate_loss|test_epoch|eval_\w+)$", function.name):
            continue
        for node in ast.walk(function):
            named = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if named in parameters and named in ("model", "net", "network", "transformer"):
                yield Report(node, f"`{named}` is evaluated as it is, with dropout: call {named}.eval() before")
                break


@rule("ATT304", Severity.ERROR)
def dropout_made_in_a_call(facts: ModuleFacts) -> Iterator[Report]:
    """A module of dropout is made where it is called, so that no `model.eval()` reaches it."""
    around = (function_around(site.output.node, facts) for site in facts.sites)
    for function in dict.fromkeys(one for one in around if one is not None):
        made = {
            name.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _makes_dropout(node.value, facts)
            for name in node.targets
            if isinstance(name, ast.Name)
        }
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            module = made.get(node.func.id) if isinstance(node.func, ast.Name) else node.func
            if _makes_dropout(module, facts) and "training" not in ast.unparse(function):
                yield Report(node, "this dropout is made here, in training mode, and drops in evaluation too")


def _makes_dropout(node: ast.AST | None, facts: ModuleFacts) -> bool:
    """Whether an expression is a call of `torch.nn.Dropout`."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("Dropout", "Dropout1d", "AlphaDropout"):
        return False
    named = ast.unparse(node.func).partition(".")[0]
    return facts.imports.get(named, "").startswith("torch")


@rule("ATT305", Severity.WARNING)
def dropout_without_a_use(facts: ModuleFacts) -> Iterator[Report]:
    """A class that attends makes a dropout, and nothing in the file uses it."""
    attending = {site.event.class_.node for site in facts.sites if site.event.class_ is not None}
    read = {node.attr for node in facts.nodes[ast.Attribute] if isinstance(node.ctx, ast.Load)}
    for node in facts.nodes[ast.Assign]:
        target = node.targets[0]
        if not isinstance(target, ast.Attribute) or not _makes_dropout(node.value, facts):
            continue
        class_ = facts.parents.get(function_around(node, facts) or node)
        is_own = class_ in attending and all(last_name(base) == "Module" for base in getattr(class_, "bases", []))
        if is_own and target.attr not in read and f'"{target.attr}"' not in facts.source:
            yield Report(node, f"`{ast.unparse(target)}` is made and never used: the weights are not dropped")


@rule("ATT311", Severity.WARNING)
def softmax_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax of scores is computed in half precision."""
    for site in formulas(facts):
        if site.softmax is None:
            continue
        dtype, far = site.softmax.get("dtype"), False
        if is_none(dtype):
            casts = [step.term.get("dtype") for step in site.before if step.op == "cast" and not step.conditional]
            dtype = casts[-1] if casts else dtype_of_projection(site.query)
            around = [function_around(one.node, facts) for one in (site.softmax, dtype) if one is not None]
            far = not casts and len(set(map(id, around))) > 1
        if dtype is not None and dtype.op == "name" and dtype.value in HALF:
            yield Report(
                site.softmax.node,
                f"softmax of scores in {str(dtype.value).removeprefix('torch.')}: pass dtype=torch.float32",
                unless="autocast computes it in float32" if far else "",
            )
