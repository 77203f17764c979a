"""Questions about Python's syntax trees: what is in a node, which names it reads or binds, how it is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)


def below(node: ast.AST | None, *types: type[_Node]) -> Iterator[_Node]:
    """The nodes of these types in a node, itself included; none in None."""
    return (one for one in ast.walk(node) if isinstance(one, types)) if node is not None else iter(())


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


def parameters(function: Function | None) -> list[ast.arg]:
    """The parameters of a function that have a name each, in their order; none of None."""
    arguments = function.args if function is not None else None
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if arguments is not None else []


def defaults_of(function: Function) -> dict[str, ast.expr]:
    """The defaults of the parameters that may be left out: the last ones have them."""
    defaults = [*function.args.defaults, *function.args.kw_defaults]
    pairs = zip(parameters(function)[::-1], defaults[::-1], strict=False)
    return {one.arg: default for one, default in pairs if default is not None}
