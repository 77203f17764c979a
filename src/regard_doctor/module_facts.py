"""What symbolic evaluation finds in a module: its operations in order, their loops, functions and classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import array_frameworks
from .term import Term

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


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


def parameters_of(function: Function) -> list[ast.arg]:
    """The parameters of a function that have a name each, in their order."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def defaults_of(function: Function) -> dict[str, ast.expr]:
    """The defaults of the parameters that may be left out: the last ones have them."""
    defaults = [*function.args.defaults, *function.args.kw_defaults]
    pairs = zip(parameters_of(function)[::-1], defaults[::-1], strict=False)
    return {one.arg: default for one, default in pairs if default is not None}


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
            above: ast.AST = node
            while above in facts.parents and not isinstance(above, Function):
                above = facts.parents[above]
            if isinstance(above, Function) and above.name != "__init__":
                found.setdefault(facts.parents[above], set()).add(node.attr)
    return {class_: frozenset(names) for class_, names in found.items()}
