"""What symbolic evaluation finds in a module: its operations in order, their loops, functions and classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from . import array_frameworks
from .python_syntax import Function, below, defaults_of
from .term import Term

_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop, or a comprehension, around an expression; `names` are its variables."""

    node: ast.AST
    names: frozenset[str]
    iterated: Term | None


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An evaluated operation and the place that it was evaluated at.

    `depth` counts the followed calls around it; `caller` is the class whose method makes the outermost of these, at
    `call`.
    """

    term: Term
    loops: tuple[Loop, ...]
    function: Function | None
    class_: ClassFacts | None
    depth: int
    caller: ClassFacts | None = None
    call: ast.Call | None = None

    @property
    def node(self) -> Any:
        """The place of the operation."""
        return self.term.node

    @property
    def name(self) -> str:
        """The last part of the name of what is called, such as "cos"."""
        return str(self.term.value).rpartition(".")[2]


@dataclass(slots=True, eq=False)
class ClassFacts:
    """A class: its methods, and the terms that its constructor assigns to attributes of `self`."""

    node: ast.ClassDef
    methods: dict[str, Function]
    attributes: dict[str, Term] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.node.name


@dataclass(slots=True, eq=False)
class ModuleFacts:
    """All that symbolic evaluation found in one module.

    `events` in the order of evaluation; `consumers` maps the identity of a term to what was computed from it;
    `followed` are the functions that were evaluated in place at a call; `nodes` has the nodes of the tree by their
    types, `parents` the node above each; `is_test`: the file is one of tests or benchmarks, by its path or its imports;
    `path`: where it is, beside the files that it imports; `framework`: jax or another one whose arrays it computes
    with instead of torch's tensors, "" for torch.
    """

    tree: ast.Module
    source: str
    imports: dict[str, str]
    functions: dict[str, Function]
    classes: dict[str, ClassFacts]
    events: list[Event] = field(default_factory=list)
    consumers: defaultdict[int, list[Term]] = field(default_factory=lambda: defaultdict(list))
    followed: set[Function] = field(default_factory=set)
    sites: list = field(default_factory=list)
    is_test: bool = False
    path: str = ""
    framework: str = ""
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    nodes: defaultdict[type, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def operations(self, *ops: str) -> list[Event]:
        """The events of these operations."""
        return [event for event in self.events if event.term.op in ops]

    def uses(self, term: Term | None, *ops: str) -> list[Term]:
        """What was computed from a term, by these operations if any are named."""
        return [one for one in self.consumers.get(id(term), ()) if not ops or one.op in ops]

    def judged(self, *ops: str) -> list[Event]:
        """As `operations`, without those that the callers of their functions, in the same file, tell more about."""
        return [event for event in self.operations(*ops) if self.is_judged(event)]

    def is_judged(self, event: Event) -> bool:
        """Whether an event is not one that the callers of its function, in the same file, tell more about."""
        return event.depth > 0 or event.function not in self.followed

    def applied(self, *modules: str) -> list[Event]:
        """The calls of modules of these qualified class names."""
        return [event for event in self.events if event.term.applies(*modules)]

    # Where a node stands

    def around(self, node: ast.AST | None) -> Iterator[ast.AST]:
        """A node and those in which it stands, the innermost first; nothing for None."""
        while node is not None:
            yield node
            node = self.parents.get(node)

    def within_function(self, node: ast.AST | None) -> Iterator[ast.AST]:
        """A node and those in which it stands, up to the function around, without it."""
        return takewhile(lambda one: not isinstance(one, Function), self.around(node))

    def statement_around(self, node: ast.AST | None) -> ast.stmt | None:
        """The statement in which a node stands."""
        return next((one for one in self.around(node) if isinstance(one, ast.stmt)), None)

    def function_around(self, node: ast.AST | None) -> Function | None:
        """The function in whose text a node stands; None at the level of a class or of the module."""
        return next((one for one in self.around(node) if isinstance(one, Function)), None)

    def text_around(self, node: ast.AST | None) -> str:
        """The text of the function around a node, with its comments; "" where there is none."""
        function = self.function_around(node)
        return ast.get_source_segment(self.source, function) or "" if function is not None else ""

    def definitions_around(self, node: ast.AST | None) -> Iterator[Function | ast.ClassDef]:
        """The functions and classes in whose text a node stands, the innermost first."""
        return (one for one in self.around(node) if isinstance(one, Function | ast.ClassDef))

    def class_around(self, node: ast.AST | None) -> ast.ClassDef | None:
        """The innermost class in whose text a node stands; None at the level of the module."""
        return next((one for one in self.definitions_around(node) if isinstance(one, ast.ClassDef)), None)

    def tests_around(self, node: ast.AST | None) -> Iterator[ast.expr]:
        """The conditions, of the same function, on which it depends whether a node is reached; the innermost first."""
        above = (one for one in self.within_function(node) if one is not node)
        return (one.test for one in above if isinstance(one, ast.If | ast.IfExp))

    def beside(self, node: ast.AST, *types: type[_Node]) -> Iterator[_Node]:
        """The nodes of these types in the function around a node, or in the node where there is none."""
        return below(self.function_around(node) or node, *types)

    def is_used_as_value(self, function: Function) -> bool:
        """Whether a function is returned, stored or passed on in its file, so that it is called from elsewhere."""
        used = (one for one in self.nodes[ast.Name] if one.id == function.name and isinstance(one.ctx, ast.Load))
        return any(not (isinstance(above := self.parents[one], ast.Call) and above.func is one) for one in used)

    def comments_at(self, node: ast.AST) -> Iterator[str]:
        """The comments beside and above a statement, and above the function around it."""
        lines = self.source.splitlines()
        statement = next((one for one in self.around(node) if isinstance(one, ast.stmt | ast.arg)), None)
        for one in (statement, self.function_around(node)):
            if one is None:
                continue
            first = min([one.lineno, *(made.lineno for made in getattr(one, "decorator_list", []))])
            last = one.lineno if isinstance(one, Function) else one.end_lineno or one.lineno
            above = first - 1
            while above > 0 and lines[above - 1].lstrip().startswith("#"):
                above -= 1
            yield from (line.partition("#")[2] for line in lines[above:last])

    def default_of(self, parameter: Term) -> ast.expr | None:
        """The default of the parameter that a term is, or None where it has none."""
        function = self.function_around(parameter.node)
        return None if function is None else defaults_of(function).get(str(parameter.value))


def indexed(tree: ast.Module, source: str) -> ModuleFacts:
    """A module whose nodes, imports, functions and classes are known, and nothing of it is evaluated."""
    facts = ModuleFacts(tree, source, {}, {}, {})
    _index(facts)
    changed = _changed(facts)
    for node in facts.nodes[ast.ClassDef]:
        methods = {one.name: one for one in node.body if isinstance(one, Function)}
        facts.classes.setdefault(node.name, ClassFacts(node, methods, changed=changed.get(node, frozenset())))
    facts.functions.update({node.name: node for node in facts.tree.body if isinstance(node, Function)})
    return facts


def _index(facts: ModuleFacts) -> None:
    """Find all nodes by their types, the node above each, and the qualified name that each imported name stands for."""
    waiting: list[ast.AST] = [facts.tree]
    for node in waiting:  # grows while it is read: from the top of the tree down, each level in the order of the source
        facts.nodes[type(node)].append(node)
        for value in vars(node).values():
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context | ast.operator):
                    facts.parents[child] = node
                    waiting.append(child)
    for alias in (one for node in facts.nodes[ast.Import] for one in node.names):
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        facts.imports[alias.asname or name] = name
    for node in facts.nodes[ast.ImportFrom]:
        facts.imports.update({alias.asname or alias.name: f"{node.module or ''}.{alias.name}" for alias in node.names})
    facts.framework = array_frameworks.framework_of(facts.imports.values())


def _changed(facts: ModuleFacts) -> dict[ast.AST, frozenset[str]]:
    """Attributes of `self` that methods other than the constructor assign, by class."""
    found: dict[ast.AST, set[str]] = {}
    for node in facts.nodes[ast.Attribute]:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            method = facts.function_around(node)
            if method is not None and method.name != "__init__":
                found.setdefault(facts.parents[method], set()).add(node.attr)
    return {class_: frozenset(names) for class_, names in found.items()}
