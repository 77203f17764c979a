"""Rewrites of `--fix` tried on code as it stands: the statements before and after, run on random tensors.

Nothing is imported from the rewritten file. The statements that a rewrite replaces are taken out of their function;
names that are tensors there get random ones, of several shapes until the statements run, and attributes get numbers.
Where that succeeds, the new call has to give the same result and the same gradients.
"""

from __future__ import annotations

import ast
import copy
import importlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard_doctor.diagnosis import EVERYTHING, reported
from regard_doctor.rewriting import ReplaceExpression, Rewrite

_RESULT = "result_of_the_trial"
_LENGTH, _WIDTH = 6, 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One rewrite: where it is, and whether both sides "agree", "differ", or the old one could not be run alone."""

    line: int
    outcome: str
    detail: str = ""


class _Stub:
    """What `self` and configurations are in a trial: numbers, dropout that is off, and themselves."""

    training = False

    def __getattr__(self, name: str) -> Any:
        if re.search(r"drop", name):
            return nn.Dropout(0.0)
        if re.search(r"scal|temper|norm_fact|factor", name):
            return 0.37
        if re.search(r"softmax", name):
            return nn.Softmax(dim=-1)
        if re.search(r"dim|head|size|d_k|width|inner", name):
            return _WIDTH
        if re.search(r"mask|bias|causal", name):
            return torch.ones(1, 1, _LENGTH, _LENGTH).tril()
        raise AttributeError(name)


def trials(source: str) -> list[Trial]:
    """All rewrites of formulas that a source gets, each tried."""
    found = [report.rewrite for _, report in reported(source, selection=EVERYTHING) if report and report.rewrite]
    tree = ast.parse(source)
    return [_trial(rewrite, tree) for rewrite in found if isinstance(rewrite.edits[-1], ReplaceExpression)]


def _trial(rewrite: Rewrite, tree: ast.Module) -> Trial:
    replaced = rewrite.edits[-1]
    assert isinstance(replaced, ReplaceExpression)
    before = [_same_place(edit.node, tree) for edit in rewrite.edits[:-1]]
    output = _same_place(replaced.node, tree)
    old = [copy.deepcopy(one) for one in sorted(before, key=lambda one: one.lineno)]  # type: ignore[attr-defined]
    old_code = "\n".join([*map(ast.unparse, old), f"{_RESULT} = {ast.unparse(output)}"])
    new_code = f"{_RESULT} = {replaced.code}"
    call = ast.parse(replaced.code, mode="eval").body
    assert isinstance(call, ast.Call)
    line = getattr(output, "lineno", 0)
    operands = [ast.unparse(one) for one in call.args[:3]]
    masks = [ast.unparse(one.value) for one in call.keywords if one.arg == "attn_mask"]
    for names in _environments(tree, old_code + "\n" + new_code, operands, masks):
        expected = _run(old_code, names, operands)
        if expected is None:
            continue
        found = _run(new_code, names, operands)
        if found is None:
            return Trial(line, "differ", f"the new call does not run:\n{old_code}\n->\n{new_code}")
        same = all(torch.allclose(one, other, atol=1e-4) for one, other in zip(expected, found, strict=True))
        return Trial(line, "agree" if same else "differ", "" if same else f"{old_code}\n->\n{new_code}")
    return Trial(line, "not run", old_code)


def _same_place(node: ast.AST, tree: ast.Module) -> Any:
    """The node of another tree of the same source at the same place."""
    for one in ast.walk(tree):
        if type(one) is type(node) and all(
            getattr(one, name, None) == getattr(node, name, None)
            for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")
        ):
            return one
    raise AssertionError("no such node")


def _environments(tree: ast.Module, code: str, operands: list[str], masks: list[str]) -> Iterator[dict[str, Any]]:
    """Names for the statements: modules as imported, tensors of one rank after the other, stubs and numbers."""
    names = {one.id for one in ast.walk(ast.parse(code)) if isinstance(one, ast.Name)}
    modules = _modules(tree)
    free = sorted(names - modules.keys() - {_RESULT} - set(dir(__builtins__)) - {"float", "int", "None"})
    tensors = [name for name in free if any(re.search(rf"\b{name}\b", one) for one in operands)]
    masked = [name for name in free if name not in tensors and any(re.search(rf"\b{name}\b", one) for one in masks)]
    hidden = {name for name in free if re.search(rf"masked_fill_?\({name},", code)} - set(masked) - set(tensors)
    kinds = (True, False) if "masked_fill" in code else (False,)
    generator = torch.Generator().manual_seed(0)
    for leading, turned, boolean, rank in itertools.product(
        ((2, 3), (2,), (1, 4), ()), (False, True), kinds, (2, 3, 4)
    ):
        made: dict[str, Any] = {}
        for name in tensors:
            shape = (*leading, _LENGTH, _WIDTH)
            if (
                turned
                and re.fullmatch(rf"{name}(\.transpose\(-2, -1\))?", operands[1])
                and name == operands[1][: len(name)]
            ):
                shape = (*leading, _WIDTH, _LENGTH)
            made[name] = torch.randn(shape, generator=generator)
        for name in masked:
            keep = torch.rand(_LENGTH, _LENGTH, generator=generator) < 0.7
            keep = (keep | torch.eye(_LENGTH, dtype=torch.bool)).view(*(1,) * (rank - 2), _LENGTH, _LENGTH)
            made[name] = keep if boolean else torch.randn(keep.shape, generator=generator)
        for name in free:
            if name in hidden:
                made[name] = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)
            elif name not in made:
                made[name] = _Stub() if re.search(rf"\b{name}\.", code) else _number(name)
        yield {**modules, **made}


def _number(name: str) -> Any:
    if re.search(r"drop|^p$", name):
        return 0.0
    if re.search(r"train|causal", name):
        return False
    if re.fullmatch(r"n|t|l|length|seq_?len(gth)?|tgt_len|src_len|q_len|kv_seq_len", name, re.I):
        return _LENGTH
    return 0.37 if re.search(r"scal|temper|factor", name) else _WIDTH


def _modules(tree: ast.Module) -> dict[str, Any]:
    """What a file imports of torch, NumPy and the standard library's math."""
    found: dict[str, Any] = {"torch": torch}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if re.match(r"(torch|math|numpy|einops)(\.|$)", alias.name):
                    found[alias.asname or alias.name.partition(".")[0]] = importlib.import_module(
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and re.match(r"(torch|math|numpy|einops)(\.|$)", node.module or ""):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if hasattr(module, alias.name):
                    found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def _run(code: str, names: dict[str, Any], operands: list[str]) -> list[Tensor] | None:
    """The result and the gradients of the operands that are plain names; None where the code does not run."""
    made = {
        key: value.clone().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
        for key, value in names.items()
    }
    leaves = [made[name] for name in dict.fromkeys(operands) if isinstance(made.get(name), Tensor)]
    scope = dict(made)
    try:
        exec(code, scope)  # the file's own statements, of an installed library
        result = scope[_RESULT]
        if not isinstance(result, Tensor) or result.isnan().any():
            return None
        weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
        gradients = torch.autograd.grad((result * weights).sum(), leaves, allow_unused=True) if leaves else []
    except Exception:
        return None
    return [result, *(one for one in gradients if one is not None)]
