"""Rules about dropout of weights, and about the precision of the softmax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import islice

from ..attention_sites import dtype_of_projection
from ..finding import Severity
from ..module_facts import Event, ModuleFacts
from ..python_syntax import below, bound_names, code_of, last_name, parameters
from ..term import ABSENT, HALF, Term, is_none, label, number, walk
from .base import Report, formulas, rule, with_attributes


@rule("ATT301", Severity.ERROR)
def dropout_in_evaluation(facts: ModuleFacts) -> Iterator[Report]:
    """Dropout of the weights, or of what attention reads, stays on in evaluation."""
    for event in facts.operations("sdpa"):
        if _is_always_on(event.term["dropout_p"], event) and not _is_tested_for_none(event, facts):
            yield Report(
                event.node,
                "dropout_p does not depend on self.training, so dropout stays on in evaluation: "
                "pass `p if self.training else 0.0`",
            )
    attending = {event.caller or event.class_ or event.function for event in facts.operations("softmax", "sdpa")}
    for event in facts.operations("dropout") if facts.sites else ():
        functional = str(event.term.value).endswith("functional.dropout")
        left_out = "training" not in event.term.arguments  # training=True is on purpose
        attends = (event.class_ or event.function) in attending
        if functional and left_out and attends and not _is_chosen_elsewhere(event, facts):
            yield Report(event.node, "F.dropout without training=self.training drops in evaluation too")


def _is_tested_for_none(event: Event, facts: ModuleFacts) -> bool:
    """Whether a call is made only without dropout: by a condition, or by an attribute that is true only then."""
    tests = (with_attributes(test, event) for test in facts.tests_around(event.node))
    return any(re.search(r"drop\w*(\.p)? == 0|not [\w.]*drop", test) for test in tests)


def _is_chosen_elsewhere(event: Event, facts: ModuleFacts) -> bool:
    """Whether the probability may be 0 in evaluation: the caller passes it, a branch sets it, or a test is around."""
    probability = event.term["p"]
    if number(probability) == 0 or probability.op == "choice":
        return True
    passed = probability.op == "parameter" and _is_of_caller(probability, facts)
    return passed or any(map(_is_other_condition, facts.tests_around(event.node)))


def _is_other_condition(test: ast.expr) -> bool:
    """Whether a condition depends on something else than whether there is dropout at all."""
    names = {last_name(node) for node in below(test, ast.Name, ast.Attribute)} - {"self", "config", "p"}
    return any("drop" not in name or re.search(r"switch|training", name) for name in names)


def _is_of_caller(parameter: Term, facts: ModuleFacts) -> bool:
    """Whether each call of a function passes a probability, 0 unless it does; a constructor keeps it for all calls."""
    function = facts.function_around(parameter.node)
    if function is None or function.name == "__init__":
        return False
    default = facts.default_of(parameter)
    return not (isinstance(default, ast.Constant) and isinstance(default.value, float | int) and default.value > 0)


def _is_always_on(probability: Term, event: Event) -> bool:
    """Whether a probability is a number, or an attribute that holds one, whatever the mode of the model is."""
    if any(label(one) == "training" for one in walk(probability)):
        return False
    if probability.op == "parameter":
        constructor = event.class_.methods.get("__init__") if event.class_ is not None else None
        return any(probability.node is one for one in parameters(constructor))
    if probability.op == "attribute":
        base = probability.input
        configured = base.op == "parameter" and label(base) in ("config", "cfg", "args", "hparams", "opt")
        return configured or (probability.value == "p" and base.op in ("call", "self", "attribute"))
    return (number(probability) or 0) > 0


@rule("ATT302", Severity.ERROR)
def dropout_off_for_ever(facts: ModuleFacts) -> Iterator[Report]:
    """A call in evaluation sets the probability of dropout to 0, and nothing sets it back."""
    for node in facts.nodes[ast.Assign]:
        written = code_of(node.targets[0]) if getattr(node.value, "value", None) == 0 else ""
        function = facts.function_around(node)
        named = re.match(r"self\..*(drop(out)?(_p|_prob|_rate)?|dropout\w*\.p)$", written)
        if not named or function is None or function.name == "__init__":
            continue
        others = (one for one in facts.nodes[ast.Assign] if one is not node and code_of(one.targets[0]) == written)
        made_once = all(getattr(facts.function_around(one), "name", "") == "__init__" for one in others)
        if made_once and re.search(r"self\.training|\.eval\(", ast.unparse(function)):
            message = f"`{written}` stays 0 after the first evaluation: choose it by self.training at each call"
            yield Report(node, message)


@rule("ATT303", Severity.WARNING)
def evaluation_in_training_mode(facts: ModuleFacts) -> Iterator[Report]:
    """A function evaluates a model that nothing in the file switches to evaluation."""
    switches = ".eval()" in facts.source or ".train(False)" in facts.source
    if not facts.sites or switches or "ropout" not in facts.source:
        return
    for function in facts.nodes[ast.FunctionDef]:
        if re.match(r"(evaluate|validate|validation|estimate_loss|test_epoch|eval_\w+)$", function.name):
            models = {one.arg for one in function.args.args} & {"model", "net", "network", "transformer"}
            called = (one for one in below(function, ast.Call) if isinstance(one.func, ast.Name))
            for node in islice((one for one in called if code_of(one.func) in models), 1):
                name = code_of(node.func)
                yield Report(node, f"`{name}` is evaluated as it is, with dropout: call {name}.eval() before")


@rule("ATT304", Severity.ERROR)
def dropout_made_in_a_call(facts: ModuleFacts) -> Iterator[Report]:
    """A module of dropout is made where it is called, so that no `model.eval()` reaches it."""
    attending = dict.fromkeys(facts.function_around(site.node) for site in facts.sites)
    for function in (one for one in attending if one is not None and "training" not in ast.unparse(one)):
        made = {
            name
            for node in below(function, ast.Assign)
            if _makes_dropout(node.value, facts)
            for target in node.targets
            for name in bound_names(target)
        }
        for node in below(function, ast.Call):
            if _makes_dropout(node.func, facts) or (isinstance(node.func, ast.Name) and node.func.id in made):
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
        class_ = facts.parents.get(facts.function_around(node) or node)
        is_own = class_ in attending and all(last_name(base) == "Module" for base in getattr(class_, "bases", []))
        if is_own and target.attr not in read and f'"{target.attr}"' not in facts.source:
            yield Report(node, f"`{ast.unparse(target)}` is made and never used: the weights are not dropped")


@rule("ATT311", Severity.WARNING)
def softmax_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax of scores is computed in half precision."""
    for site in formulas(facts):
        dtype, far = site.softmax["dtype"], False
        if is_none(dtype):
            casts = [step.term["dtype"] for step in site.before if step.op == "cast" and not step.conditional]
            dtype = casts[-1] if casts else dtype_of_projection(site.query) or ABSENT
            function = facts.function_around(site.softmax.node)
            far = not casts and facts.function_around(dtype.node) is not function
        if dtype.op == "name" and dtype.value in HALF:
            message = f"softmax of scores in {str(dtype.value).removeprefix('torch.')}: pass dtype=torch.float32"
            yield Report(site.softmax.node, message, unless="autocast computes it in float32" if far else "")
