"""Rewrites of source text: edits of single expressions and statements, carried out on LibCST's tree.

LibCST keeps every comment and blank that an edit does not touch, and its result is valid Python by construction.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .call_layout import WIDTH, laid_out
from .doctor_error import DoctorError

if TYPE_CHECKING:
    import libcst


@dataclass(frozen=True, slots=True)
class AddKeyword:
    """Pass one more keyword argument to a call."""

    node: ast.Call
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ReplaceExpression:
    """Replace an expression by other code."""

    node: ast.expr
    code: str


@dataclass(frozen=True, slots=True)
class RemoveStatement:
    """Remove a statement, with the comments above it."""

    node: ast.stmt


Edit: TypeAlias = AddKeyword | ReplaceExpression | RemoveStatement
Span: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The edits that mend one finding, carried out together; `imports` are modules that the new code names.

    `regard` is the code of the last edit with `regard.attention` instead of torch's function, where there is one.
    """

    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()
    regard: str = ""

    def lines(self) -> list[tuple[int, int]]:
        """The first and the last line of each edit."""
        return [(_span(edit.node)[0], _span(edit.node)[2]) for edit in self.edits]

    def to_regard(self) -> Rewrite:
        """The rewrite to `regard.attention`; the rewrite itself where it computes no attention."""
        last = self.edits[-1]
        if not self.regard or not isinstance(last, ReplaceExpression):
            return self
        return Rewrite((*self.edits[:-1], ReplaceExpression(last.node, self.regard)), ("regard",), self.regard)


def rewritten(source: str, rewrites: Iterable[Rewrite], width: int = WIDTH) -> tuple[str, int]:
    """The source after the rewrites, and their number; of two that touch the same code, the first is carried out.

    width: columns of a line, beyond which a call is laid out on several.

    Raises:
        DoctorError: LibCST is not installed.
    """
    chosen: list[Rewrite] = []
    for rewrite in rewrites:
        if not any(_overlap(edit.node, other.node) for edit in rewrite.edits for one in chosen for other in one.edits):
            chosen.append(rewrite)
    if not chosen:
        return source, 0
    try:
        import libcst
    except ModuleNotFoundError:
        raise DoctorError("rewriting needs the package 'libcst', which is not installed; pip install libcst") from None

    edits = [edit for rewrite in chosen for edit in rewrite.edits]
    wrapper = libcst.MetadataWrapper(libcst.parse_module(source), unsafe_skip_copy=True)
    changed = wrapper.visit(_editor(source, edits, width))
    imports = sorted({name for rewrite in chosen for name in rewrite.imports})
    return _with_imports(changed, imports).code, len(chosen)


def _overlap(one: ast.AST, other: ast.AST) -> bool:
    first, second = _span(one), _span(other)
    return first[:2] < second[2:] and second[:2] < first[2:]


def _span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _editor(source: str, edits: Sequence[Edit], width: int) -> libcst.CSTTransformer:
    """The transformer that carries out the edits; its class is made here, because LibCST is imported late."""
    import libcst
    from libcst.metadata import PositionProvider

    lines = source.splitlines(keepends=True)
    expressions = {_in_characters(edit.node, lines): edit for edit in edits if not isinstance(edit, RemoveStatement)}
    removed = {_in_characters(edit.node, lines)[:2] for edit in edits if isinstance(edit, RemoveStatement)}

    class Editor(libcst.CSTTransformer):
        """Replaces the nodes whose positions are those of the edits."""

        METADATA_DEPENDENCIES = (PositionProvider,)

        def on_leave(self, original_node: Any, updated_node: Any) -> Any:
            updated = super().on_leave(original_node, updated_node)
            place = self.get_metadata(PositionProvider, original_node, None)
            if place is None:
                return updated
            start = place.start.line, place.start.column
            if isinstance(original_node, libcst.SimpleStatementLine | libcst.If) and start in removed:
                return libcst.RemoveFromParent()
            edit = expressions.get((*start, place.end.line, place.end.column))
            if edit is None or not isinstance(original_node, libcst.BaseExpression):
                return updated
            if isinstance(edit, ReplaceExpression):
                return libcst.parse_expression(fitting(edit.code, place))
            value = libcst.parse_expression(edit.value)
            equal = libcst.AssignEqual(libcst.SimpleWhitespace(""), libcst.SimpleWhitespace(""))
            keyword = libcst.Arg(value, libcst.Name(edit.name), equal)
            longer = _with_argument(updated, keyword)
            return libcst.parse_expression(fitting(libcst.Module([]).code_for_node(longer), place))

    def fitting(code: str, place: Any) -> str:
        before, after = lines[place.start.line - 1][: place.start.column], lines[place.end.line - 1][place.end.column :]
        return laid_out(code, before, after.partition("#")[0].rstrip(), width)

    return Editor()


def _with_argument(call: Any, keyword: Any) -> Any:
    """A call with one more argument, behind the others; a comma after the last, as of a call on many lines, stays."""
    import libcst

    arguments = list(call.args)
    if arguments:
        last = arguments[-1]
        if isinstance(last.comma, libcst.Comma):
            keyword = keyword.with_changes(comma=last.comma)
            arguments[-1] = last.with_changes(comma=libcst.Comma(whitespace_after=call.whitespace_before_args))
        else:
            keyword = keyword.with_changes(whitespace_after_arg=last.whitespace_after_arg)
            comma = libcst.Comma(whitespace_after=libcst.SimpleWhitespace(" "))
            arguments[-1] = last.with_changes(comma=comma, whitespace_after_arg=libcst.SimpleWhitespace(""))
    return call.with_changes(args=[*arguments, keyword])


def _in_characters(node: Any, lines: Sequence[str]) -> Span:
    """The span of a node of `ast`, its columns in characters instead of bytes."""

    def column(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode(errors="ignore"))

    first, start, last, end = _span(node)
    return first, column(first, start), last, column(last, end)


def _with_imports(module: libcst.Module, names: Sequence[str]) -> libcst.Module:
    from libcst.codemod import CodemodContext
    from libcst.codemod.visitors import AddImportsVisitor

    if not names:
        return module
    context = CodemodContext()
    for name in names:
        AddImportsVisitor.add_needed_import(context, name)
    return AddImportsVisitor(context).transform_module(module)
