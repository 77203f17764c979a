"""The form of a rule: a function over the facts of a module, with a code, a severity, and a text with examples."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..attention_sites import WrittenFormula
from ..finding import Severity
from ..mistake_texts import MistakeText, read_section, texts_in
from ..module_facts import Event, Function, ModuleFacts, defaults_of, parameters_of
from ..term import Term

if TYPE_CHECKING:
    from ..rewriting import Rewrite


@dataclass(frozen=True, slots=True)
class Report:
    """What a rule found: the place, the message, and the rewrite that mends it, if there is one.

    `unless` says under which circumstances it is no mistake, where callers, other files, options or names decide that
    and the file does not show it. Such a finding is a hint, whatever the severity of its rule, and its message says so.
    """

    node: ast.AST
    message: str
    rewrite: Rewrite | None = None
    unless: str = ""


OF_ARRAYS = frozenset(
    {
        *("ATT101", "ATT102", "ATT103", "ATT104", "ATT105", "ATT106", "ATT111", "ATT113"),
        *("ATT201", "ATT202", "ATT203", "ATT204", "ATT205", "ATT206", "ATT207", "ATT208", "ATT215", "ATT217", "ATT220"),
        *("ATT252", "ATT401", "ATT402", "ATT403", "ATT405", "ATT406", "ATT408"),
    }
)
"""Rules that files of JAX, Flax, Keras and TensorFlow are read by; the others are about torch's own functions."""

Check = Callable[[ModuleFacts], Iterator[Report]]
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """One kind of mistake: the docstring of `check` says what is wrong, and `text` why, with two examples."""

    code: str
    severity: Severity
    check: Check
    section: str = ""

    @property
    def text(self) -> MistakeText:
        """Why it is a mistake, from the Markdown file beside the rule's module, or from the rule's own section."""
        if self.section:
            return read_section(inspect.cleandoc(self.section))
        return texts_in(Path(inspect.getfile(self.check)).with_suffix(".md"))[self.code]

    @property
    def wrong(self) -> str:
        """Code with the mistake."""
        return self.text.wrong

    @property
    def right(self) -> str:
        """The same code without it."""
        return self.text.right

    @property
    def source(self) -> str:
        """A public thread, paper or manual."""
        return self.text.source

    @property
    def is_about_cost(self) -> bool:
        """Whether what it finds gives right results, at the cost of time or memory."""
        return self.code == "ATT511" or self.code.startswith("ATT6")

    @property
    def reads_arrays(self) -> bool:
        """Whether the rule holds for JAX, Flax, Keras and TensorFlow too: those about scales, axes, masks and heads."""
        return self.code in OF_ARRAYS

    @property
    def summary(self) -> str:
        """What is wrong, in a sentence."""
        return inspect.getdoc(self.check) or ""

    @property
    def explanation(self) -> str:
        """The summary, and why it is a mistake."""
        return f"{self.summary}\n\n{self.text.reason}"


RULES: dict[str, AttentionRule] = {}
"""All rules by their codes, in the order in which their modules are imported."""


def rule(code: str, severity: Severity, section: str = "") -> Callable[[Check], Check]:
    """Register a check as the rule of that code.

    section: its text, as a section of the Markdown file beside the module has it; by default that of the file.
    """

    def register(check: Check) -> Check:
        if code in RULES:
            raise AssertionError(f"two rules have the code {code}")
        RULES[code] = AttentionRule(code, severity, check, section)
        return check

    return register


def formulas(facts: ModuleFacts) -> Iterator[WrittenFormula]:
    """The attention sites that are written as the textbook formula."""
    return (site for site in facts.sites if isinstance(site, WrittenFormula))


def below(node: ast.AST | None, *types: type[_Node]) -> Iterator[_Node]:
    """The nodes of these types in a node, itself included; none in None."""
    return (one for one in ast.walk(node) if isinstance(one, types)) if node is not None else iter(())


def beside(node: ast.AST, facts: ModuleFacts, *types: type[_Node]) -> Iterator[_Node]:
    """The nodes of these types in the function around a node, or in the node where there is none."""
    return below(function_around(node, facts) or node, *types)


def around(node: ast.AST | None, facts: ModuleFacts) -> Iterator[ast.AST]:
    """A node and those in which it stands, the innermost first; nothing for None."""
    while node is not None:
        yield node
        node = facts.parents.get(node)


def within_function(node: ast.AST | None, facts: ModuleFacts) -> Iterator[ast.AST]:
    """A node and those in which it stands, up to the function around, without it."""
    return takewhile(lambda one: not isinstance(one, Function), around(node, facts))


def statement_around(node: ast.AST | None, facts: ModuleFacts) -> ast.stmt | None:
    """The statement in which a node stands."""
    return next((one for one in around(node, facts) if isinstance(one, ast.stmt)), None)


def function_around(node: ast.AST | None, facts: ModuleFacts) -> Function | None:
    """The function in whose text a node stands; None at the level of a class or of the module."""
    return next((one for one in around(node, facts) if isinstance(one, Function)), None)


def text_around(node: ast.AST | None, facts: ModuleFacts) -> str:
    """The text of the function around a node, with its comments; "" where there is none."""
    function = function_around(node, facts)
    return ast.get_source_segment(facts.source, function) or "" if function is not None else ""


def definitions_around(node: ast.AST | None, facts: ModuleFacts) -> Iterator[Function | ast.ClassDef]:
    """The functions and classes in whose text a node stands, the innermost first."""
    return (one for one in around(node, facts) if isinstance(one, Function | ast.ClassDef))


def class_around(node: ast.AST | None, facts: ModuleFacts) -> ast.ClassDef | None:
    """The innermost class in whose text a node stands; None at the level of the module."""
    return next((one for one in definitions_around(node, facts) if isinstance(one, ast.ClassDef)), None)


def tests_around(node: ast.AST | None, facts: ModuleFacts) -> Iterator[ast.expr]:
    """The conditions, of the same function, on which it depends whether a node is reached; the innermost first."""
    above = (one for one in within_function(node, facts) if one is not node)
    return (one.test for one in above if isinstance(one, ast.If | ast.IfExp))


def with_attributes(test: ast.expr, event: Event) -> str:
    """A condition as source code, and behind it what the constructor gave to the attributes that it reads."""
    attributes = event.class_.attributes if event.class_ is not None else {}
    read = (attributes[one.attr].node for one in below(test, ast.Attribute) if one.attr in attributes)
    return " ".join([ast.unparse(test), *(ast.unparse(one) for one in read if isinstance(one, ast.expr))])


def is_used_as_value(function: Function, facts: ModuleFacts) -> bool:
    """Whether a function is returned, stored or passed on in its file, so that it is called from elsewhere."""
    used = (one for one in facts.nodes[ast.Name] if one.id == function.name and isinstance(one.ctx, ast.Load))
    return any(not (isinstance(above := facts.parents[one], ast.Call) and above.func is one) for one in used)


def certain(rule: AttentionRule, report: Report, facts: ModuleFacts) -> Report:
    """A report, with the circumstance that makes it none where one is common to rules: what a program is compared with
    may cost what it does.
    """
    if report.unless or not rule.is_about_cost or not (facts.is_test or is_reference(report.node, facts)):
        return report
    return replace(report, unless="this is a test, or what something is compared with")


_REFERENCE = re.compile(
    r"(^|_)(ref|reference|naive|fallback|fake|golden|oracle|expected|test|bench|benchmark|baseline|vanilla|compare)"
    r"(_|$)|Reference|Naive|Fallback|Baseline|Vanilla|Benchmark",
)
_SAID_PLAIN = re.compile(r"\b(naive|baseline|reference implementation|benchmark|for comparison|unoptimi[sz]ed)\b", re.I)


def is_reference(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a function or class around is the plain one that others are compared with, or a test, or its result is
    named so: by its name, or by the first line of its docstring.
    """
    statement = statement_around(node, facts)
    if isinstance(statement, ast.Assign) and any(_REFERENCE.search(name) for name in target_names(statement)):
        return True
    return any(
        _REFERENCE.search(around.name) or _SAID_PLAIN.search((ast.get_docstring(around) or "").partition("\n")[0])
        for around in definitions_around(node, facts)
    )


def comments_at(node: ast.AST, facts: ModuleFacts) -> Iterator[str]:
    """The comments beside and above a statement, and above the function around it."""
    lines = facts.source.splitlines()
    statement = next((one for one in around(node, facts) if isinstance(one, ast.stmt | ast.arg)), None)
    for one in (statement, function_around(node, facts)):
        if one is None:
            continue
        first = min([one.lineno, *(made.lineno for made in getattr(one, "decorator_list", []))])
        last = one.lineno if isinstance(one, Function) else one.end_lineno or one.lineno
        above = first - 1
        while above > 0 and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        yield from (line.partition("#")[2] for line in lines[above:last])


_ON_PURPOSE = re.compile(r"(?<!not )\b(deliberate(ly)?|intentional(ly)?|on purpose|by design)\b", re.I)


def is_on_purpose(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a comment beside or above a statement, or above the function around it, says that it is meant so."""
    return any(_ON_PURPOSE.search(comment) for comment in comments_at(node, facts))


def default_of(parameter: Term, facts: ModuleFacts) -> ast.expr | None:
    """The default of the parameter that a term is, or None where it has none."""
    function = function_around(parameter.node, facts)
    return None if function is None else defaults_of(function).get(str(parameter.value))


def parameters(function: Function | None) -> list[ast.arg]:
    """The parameters of a function that have a name each, in their order; none of None."""
    return parameters_of(function) if function is not None else []


def names_below(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The plain names in a node; those that are read (`ast.Load`) or bound (`ast.Store`) alone."""
    return {one.id for one in below(node, ast.Name) if isinstance(one.ctx, context)}


def code_of(node: ast.AST | None) -> str:
    """A node as source code of its own; "" for None."""
    return "" if node is None else ast.unparse(node)


def last_name(node: ast.expr) -> str:
    """The last name of a dotted expression; "" of another one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def target_names(assigned: ast.Assign) -> set[str]:
    """The names that an assignment binds or changes in place."""
    return {name for target in assigned.targets for name in names_below(target)}


def bound_names(node: ast.expr) -> Iterator[str]:
    """The names that an expression is or lists: of `x`, and of `x, (y, z)`."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Tuple | ast.List):
        for one in node.elts:
            yield from bound_names(one)
