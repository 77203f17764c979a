"""The form of a rule: a function over the facts of a module, with a code, a severity, and a text with examples."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..attention_sites import WrittenFormula
from ..finding import Severity
from ..mistake_texts import MistakeText, read_section, texts_in
from ..module_facts import Event, ModuleFacts
from ..python_syntax import below, target_names

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


def with_attributes(test: ast.expr, event: Event) -> str:
    """A condition as source code, and behind it what the constructor gave to the attributes that it reads."""
    attributes = event.class_.attributes if event.class_ is not None else {}
    read = (attributes[one.attr].node for one in below(test, ast.Attribute) if one.attr in attributes)
    return " ".join([ast.unparse(test), *(ast.unparse(one) for one in read if isinstance(one, ast.expr))])


def certain(rule: AttentionRule, report: Report, facts: ModuleFacts) -> Report:
    """A report; of the cost of what a program is compared with, which may cost what it does, with that circumstance."""
    if report.unless or not rule.is_about_cost or not (facts.is_test or is_reference(report.node, facts)):
        return report
    return replace(report, unless="this is a test, or what something is compared with")


_REFERENCE = re.compile(
    r"(^|_)(ref|reference|naive|fallback|fake|golden|oracle|expected|test|bench|benchmark|baseline|vanilla|compare)"
    r"(_|$)|Reference|Naive|Fallback|Baseline|Vanilla|Benchmark",
)
_SAID_PLAIN = re.compile(r"\b(naive|baseline|reference implementation|benchmark|for comparison|unoptimi[sz]ed)\b", re.I)


def is_reference(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a function or class around, or the result, is named as a test, or as what others are compared with; or
    the first line of a docstring says so.
    """
    statement, definitions = facts.statement_around(node), list(facts.definitions_around(node))
    names = [
        *(target_names(statement) if isinstance(statement, ast.Assign) else ()),
        *(one.name for one in definitions),
    ]
    said = ((ast.get_docstring(one) or "").partition("\n")[0] for one in definitions)
    return any(map(_REFERENCE.search, names)) or any(map(_SAID_PLAIN.search, said))


_ON_PURPOSE = re.compile(r"(?<!not )\b(deliberate(ly)?|intentional(ly)?|on purpose|by design)\b", re.I)


def is_on_purpose(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a comment beside or above a statement, or above the function around it, says that it is meant so."""
    return any(_ON_PURPOSE.search(comment) for comment in facts.comments_at(node))
