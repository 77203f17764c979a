"""What is put in the place of terms: nothing, means, or the terms of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, ShapeError, nearest
from .attention_calls import AttentionCall, listen
from .terms import ChosenTerms, HeadTerms
from .token_alignment import TokenAlignment


class TermSource(Protocol):
    """What replaces the terms of a call."""

    def restricted(self, call: AttentionCall, chosen: ChosenTerms) -> ChosenTerms:
        """The terms that it has something for."""
        ...

    def key_sums(self, call: AttentionCall, chosen: Sequence[ChosenTerms]) -> Tensor:
        """What replaces `call.key_sums(chosen)`."""
        ...

    def outputs(self, call: AttentionCall) -> Tensor:
        """What replaces the output of whole heads, to broadcast with it."""
        ...


class NoTerms:
    """Nothing in the place of terms."""

    def restricted(self, call: AttentionCall, chosen: ChosenTerms) -> ChosenTerms:
        return chosen

    def key_sums(self, call: AttentionCall, chosen: Sequence[ChosenTerms]) -> Tensor:
        return torch.zeros_like(call.output)

    def outputs(self, call: AttentionCall) -> Tensor:
        return call.output.new_zeros(())


@dataclass(frozen=True, eq=False)
class MeanTerms:
    """Means by module: of outputs, (heads, Dv), for whole heads; of values, (key heads, Dv), for terms with keys."""

    means: Mapping[str, Tensor]

    def restricted(self, call: AttentionCall, chosen: ChosenTerms) -> ChosenTerms:
        return chosen

    def key_sums(self, call: AttentionCall, chosen: Sequence[ChosenTerms]) -> Tensor:
        heads = call.problem.value.shape[-3] if call.problem.heads else 1
        return call.key_sums(chosen, self._of(call, "mean_values", heads))

    def outputs(self, call: AttentionCall) -> Tensor:
        heads = call.output.shape[-3] if call.problem.heads else 1
        means = self._of(call, "mean_outputs", heads).to(call.output)
        return means.unsqueeze(-2) if call.problem.heads else means

    def _of(self, call: AttentionCall, function: str, heads: int) -> Tensor:
        means = self.means.get(call.module, self.means.get(""))
        if means is None:
            raise ConfigurationError(f"replace has no means of {call.module!r}; {nearest(call.module, self.means)}")
        needs = heads, call.output.shape[-1]
        if tuple(means.shape) != needs:
            raise ShapeError(
                f"the means of {call.module!r} have the shape {tuple(means.shape)}; they need {needs}, as "
                f"regard.heads.{function} returns them"
            )
        return means


@dataclass(frozen=True, eq=False)
class _Captured:
    """Sums of one module, (..., M, Dv), and the positions (M,) of their rows."""

    sums: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class Patch:
    """The terms of another run, from `capture_patch`, to be put in the place of the same terms of this one.

    keys: the keys that the sums are over, as positions of the present text; None for whole heads. alignment,
    key_alignment: which tokens of the other text stand for those of the present one; None: those at the same position.
    """

    keys: tuple[int, ...] | None
    alignment: TokenAlignment | None
    key_alignment: TokenAlignment | None
    _keys_with_partners: tuple[int, ...] | None
    _captured: Mapping[str, _Captured]

    def terms_with_partners(self, terms: HeadTerms) -> HeadTerms:
        """The terms with those of their keys that have a partner in the other text.

        Raises:
            ConfigurationError: their keys are not those of the patch.
        """
        alike = terms.keys == self.keys if terms.keys is None or self.keys is None else set(terms.keys) == {*self.keys}
        if not alike:
            raise ConfigurationError(
                f"the patch has the sums over {_said(self.keys)}, and the terms are of {_said(terms.keys)}: capture it "
                "with these terms"
            )
        return replace(terms, keys=self._keys_with_partners)

    def restricted(self, call: AttentionCall, chosen: ChosenTerms) -> ChosenTerms:
        places = self._places(call)
        return replace(chosen, rows=chosen.rows & (places >= 0))

    def key_sums(self, call: AttentionCall, chosen: Sequence[ChosenTerms]) -> Tensor:
        wanted = reduce(or_, (each.by_row(heads=call.problem.heads) for each in chosen))
        return torch.where(wanted, self.outputs(call), 0.0)

    def outputs(self, call: AttentionCall) -> Tensor:
        places, sums = self._places(call).clamp(min=0), self._captured[call.module].sums.to(call.output)
        try:
            return sums[..., places, :].expand_as(call.output)
        except RuntimeError:
            raise ShapeError(
                f"the patch of {call.module!r} is of the shape {tuple(sums.shape)}, and the call is of "
                f"{tuple(call.output.shape)}: both need the same heads and features, and the patch one sequence or as "
                "many as the call"
            ) from None

    def _places(self, call: AttentionCall) -> Tensor:
        """The index of the captured row for each row of a call, (M,); -1 for none."""
        if call.module not in self._captured:
            raise ConfigurationError(
                f"the patch has nothing of {call.module!r}; {nearest(call.module, self._captured)}"
            )
        positions = self._captured[call.module].positions.tolist()
        index = {position: place for place, position in enumerate(positions)}
        rows = _one_list(call)
        if self.alignment is None and len(rows) > 1 and rows != positions:
            raise ShapeError(
                f"the patch of {call.module!r} has {len(positions)} rows, and the call {len(rows)}: between texts "
                "whose tokens differ in number give capture_patch(alignment=regard.heads.align_tokens(before, now))"
            )
        before = rows if self.alignment is None else [self.alignment.before_of(row) for row in rows]
        places = [-1 if row is None else index.get(row, -1) for row in before]
        return torch.tensor(places, device=call.output.device)


def capture_patch(
    model: nn.Module,
    run: Callable[[], Any],
    terms: HeadTerms | None = None,
    *,
    alignment: TokenAlignment | None = None,
    key_alignment: TokenAlignment | None = None,
) -> Patch:
    """Run a model on another text, and keep what its heads compute there, for `editing(model, terms, replace=patch)`.

    Kept is one vector for each query and head: memory is linear in the length. (This is activation patching: Vig et al.
    2020, arXiv 2004.12265, section 4; of single links Wang et al. 2022, arXiv 2211.00593, section 3.1.)

    Args:
        model: the model, which computes its attention by `regard.attention`.
        run: takes no argument and runs the model on the other text, once, as a whole or step by step, without autograd.
        terms: which terms will be replaced; by default whole heads, of any module. With keys these are positions of the
            present text.
        alignment: between the tokens of the other text and those of the present one, as `align_tokens` returns it;
            without one, rows at the same position. What has no partner is not replaced: `print(alignment)`.
        key_alignment: the same of the keys, where these are of another sequence, as in cross-attention.

    Raises:
        ConfigurationError: no attention of the model was called, or of these modules; a module that was called for the
            same position twice; none of the keys has a partner.

    >>> import torch, regard
    >>> from regard.heads import HeadTerms, capture_patch, editing
    >>> layer, x = regard.nn.Attention(regard.nn.Projections(4, num_heads=2)), torch.randn(2, 1, 3, 4)
    >>> before = capture_patch(layer, lambda: layer(x[0]))
    >>> with editing(layer, HeadTerms(heads=[0, 1]), replace=before):
    ...     now = layer(x[1])
    >>> torch.allclose(now, layer(x[0]))
    True
    """
    terms = terms or HeadTerms()
    of_keys = alignment if key_alignment is None else key_alignment
    keys = None if terms.keys is None else _aligned_keys(tuple(terms.keys), of_keys)
    other = None if keys is None else tuple(before for before, _ in keys)
    sums: dict[str, list[tuple[Tensor, list[int]]]] = {}

    def capture(call: AttentionCall) -> None:
        if not terms.covers(call.module):
            return
        kept = call.output
        if other is not None:
            kept = call.key_sums([ChosenTerms.of_call(HeadTerms(keys=other), call.problem, call.rows, call.module)])
        sums.setdefault(call.module, []).append((kept.detach().clone(), _one_list(call)))

    listen(model, run, capture)
    if not sums:
        raise ConfigurationError(f"the run called no attention module {terms.module!r}: name one that it calls")
    captured = {name: _joined(name, parts) for name, parts in sums.items()}
    aligned = None if keys is None else tuple(now for _, now in keys)
    return Patch(terms.keys, alignment, key_alignment, aligned, captured)  # type: ignore[arg-type]


def _aligned_keys(keys: Iterable[int], alignment: TokenAlignment | None) -> list[tuple[int, int]]:
    """The keys that have a partner, as (position before, position now)."""
    if alignment is None:
        return [(key, key) for key in keys]
    pairs = [(alignment.before_of(key), key) for key in keys]
    found = [(before, now) for before, now in pairs if before is not None]
    if not found:
        raise ConfigurationError(f"none of the keys {[now for _, now in pairs]} has a partner: {alignment}")
    return found


def _said(keys: Iterable[int] | None) -> str:
    return "all keys" if keys is None else f"the keys {list(keys)}"


def _one_list(call: AttentionCall) -> list[int]:
    """The positions of the rows, which all sequences need to share."""
    rows = call.rows.reshape(-1, call.rows.shape[-1])
    if bool((rows != rows[:1]).any()):
        raise ConfigurationError(
            f"a patch is put by position, and the sequences of {call.module!r} have positions of their own: patch one "
            "sequence at a time"
        )
    return rows[0].tolist()


def _joined(name: str, parts: list[tuple[Tensor, list[int]]]) -> _Captured:
    """The rows of all calls of one module, one after another."""
    positions = [position for _, rows in parts for position in rows]
    if len(set(positions)) < len(positions):
        raise ConfigurationError(
            f"the run called {name!r} twice for the same position: a patch is of one text, run once, greedily where it "
            "is decoded"
        )
    return _Captured(torch.cat([sums for sums, _ in parts], -2), torch.tensor(positions))
