"""Edit what the attention of a running model computes: terms of its sums become 0, a mean, or those of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ..attention import Observation, observe_problem
from ..core.problem import Problem
from ..errors import ConfigurationError, nearest
from ..kernels import Result, choose, finite_problem
from ..kernels.hooks import (
    CURRENT_HOOK,
    AttentionHook,
    AttentionSubstitute,
    active_substitute,
    current_hook,
    no_hook,
    run_with_hook,
)
from ..lenses import Lens
from .attention_calls import NEEDS_REGARD, AttentionCall, CallListener, checked_lse, listen
from .replacements import MeanTerms, NoTerms, Patch, TermSource
from .terms import ChosenTerms, HeadTerms, WithoutTerms

TermReplacement: TypeAlias = Literal["zero", "mask"] | Mapping[str, Tensor] | Patch


@contextmanager
def editing(
    model: nn.Module, terms: HeadTerms | Iterable[HeadTerms], *, replace: TermReplacement = "zero"
) -> Iterator[None]:
    """Edit the attention of a model inside a `with` block: some terms α_ij · v_j of its sums are replaced.

    A head, a layer, a token or a link, as `HeadTerms` says, in whole sequences and in decoding step by step. For models
    that compute their attention by `regard.attention`: those of `regard.nn`, and those of transformers after
    `regard.huggingface.swap`; heads of any other model are replaced by `ablating`. Blocks may stand in one another, and
    `regard.explorer.record` around or inside one records the edited model, each call with the weights that it had.

    Args:
        model: the model that the block runs.
        terms: what is replaced, `HeadTerms` or several of them; a term that several have is replaced once.
        replace: by what.

            - "zero": nothing. The other terms of a row stay as they are; its weights then sum to less than 1.
            - "mask": the pairs do not exist, and the other keys of a row share its weight. A row without keys gives 0.
            - means by module, (heads, Dv) from `mean_outputs` for whole heads; (key heads, Dv) from `mean_values` for
              terms with keys, where α_ij · v_j becomes α_ij times the mean.
            - a `Patch`: the terms of another run, from `capture_patch`.

    Raises:
        ConfigurationError: a module or head that does not exist, another `replace`, means or a patch that lack a
            module, a patch of other keys; dropout, where terms of single keys are replaced; at the end of the block,
            that no call had such a term.
        ShapeError: means or a patch of another shape.

    Source: "mask" of links is the attention knockout of Geva et al. 2023 (arXiv 2304.14767, section 5.1); "zero" and
    means of heads are those of Michel et al. 2019 (arXiv 1905.10650, section 3).

    >>> import torch, regard
    >>> from regard.heads import HeadTerms, editing
    >>> layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=2, bias=False), mask=regard.masks.causal())
    >>> with editing(layer, HeadTerms(queries=[2])):
    ...     edited = layer(torch.randn(1, 3, 4))
    >>> edited.abs().amax(-1) > 0
    tensor([[ True,  True, False]])
    """
    chosen = (terms,) if isinstance(terms, HeadTerms) else tuple(terms)
    _check_terms(model, chosen)
    source, chosen = _source(replace, chosen)
    edit = _Edit(CallListener(model), chosen, source)
    with active_substitute(_Editor([*_outer_edits(), edit], current_hook()).substitute):
        yield
    if not edit.met:
        called = ", ".join(sorted(edit.called)[:5])
        has = f"the attention modules that were called are {called}" if called else "no attention module was called"
        raise ConfigurationError(
            f"editing changed nothing: no call in the block had a term of {', '.join(map(str, chosen))}; {has}. The "
            f"model needs to run in the block, and {NEEDS_REGARD}"
        )


def mean_values(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """The mean value vector of each key head over all keys of all calls in `run`, (key heads, Dv) by module.

    `editing(..., replace=means)` puts them in the place of the values of tokens. Keys of a cache count in each step,
    and padding counts: run whole texts, without padding.

    Args:
        model: a model that computes its attention by `regard.attention`.
        run: takes no argument and runs the model on some text, once or several times, without autograd.

    Raises:
        ConfigurationError: no attention of the model was called.

    >>> import torch, regard
    >>> model = torch.nn.Sequential(regard.nn.Attention(regard.nn.Projections(4, num_heads=2)))
    >>> regard.heads.mean_values(model, lambda: model(torch.randn(5, 7, 4)))["0"].shape
    torch.Size([2, 2])
    """
    sums: dict[str, tuple[Tensor, int]] = {}

    def add(call: AttentionCall) -> None:
        value = call.problem.value.detach()
        rows = (value if call.problem.heads else value.unsqueeze(-3)).movedim(-3, 0).flatten(1, -2)  # [H', ·, Dv]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        total, count = sums.get(call.module, (rows.new_zeros((), dtype=dtype), 0))
        sums[call.module] = total + rows.sum(1, dtype=dtype), count + rows.shape[1]

    listen(model, run, add)
    return {name: total / count for name, (total, count) in sums.items() if count}


@dataclass(eq=False)
class _Edit:
    """One edit of a model: its terms, what replaces them (None: the pairs are masked), and which calls it met."""

    listener: CallListener
    terms: Sequence[HeadTerms]
    source: TermSource | None
    called: set[str] = field(default_factory=set)
    met: bool = False

    def of_call(self, problem: Problem) -> _CallEdit | None:
        """What is to be done in one call; None for nothing."""
        module, rows = self.listener.place(problem)
        if not module:
            return None
        self.called.add(module)
        fitting = (terms for terms in self.terms if terms.covers(module))
        found = [ChosenTerms.of_call(terms, problem, rows, module) for terms in fitting]
        found = [chosen for chosen in found if not chosen.is_empty]
        self.met = self.met or bool(found)
        return _CallEdit(module, rows, found, self.source) if found else None


@dataclass(frozen=True, eq=False)
class _CallEdit:
    """The terms that one call has, and what replaces them."""

    module: str
    rows: Tensor
    chosen: Sequence[ChosenTerms]
    source: TermSource | None

    def edited(self, problem: Problem, output: Tensor, lse: Tensor) -> Tensor:
        """The output with the terms replaced: those of single keys first, then whole sums."""
        if self.source is None:
            return output
        call = AttentionCall(self.module, problem, output, lse, self.rows)
        chosen = [self.source.restricted(call, each) for each in self.chosen]
        if single := [each for each in chosen if each.columns is not None]:
            if problem.dropout is not None:
                raise ConfigurationError(
                    f"{self.module!r} drops weights, and terms of single keys are those without dropout: call "
                    "model.eval() first"
                )
            output = output - call.key_sums(single) + self.source.key_sums(call, single)
        if whole := [each for each in chosen if each.columns is None]:
            rows = reduce(or_, (each.by_row(heads=problem.heads) for each in whole))
            output = torch.where(rows, self.source.outputs(call).to(output.dtype), output)
        return output


@dataclass(frozen=True, eq=False)
class _Editor:
    """Computes attention with some edits, and calls a hook with each problem as it was computed."""

    edits: Sequence[_Edit]
    hook: AttentionHook | None

    @property
    def substitute(self) -> AttentionSubstitute:
        """This editor in place of the kernels."""
        return AttentionSubstitute(
            self.compute,
            observe=self.observe,
            hook=self.hook,
            with_hook=lambda hook: _Editor(self.edits, hook).substitute,
        )

    def compute(self, problem: Problem) -> Result | None:
        """The edited result; None where the kernel computes it."""
        found = self._found(problem)
        if not found and self.hook is None:
            return None
        problem = replace(_masked(problem, found), wants_lse=problem.wants_lse or bool(found))
        kernel = choose(problem)
        result = kernel.run(problem) if self.hook is None else run_with_hook(problem, kernel, self.hook)
        if not found:
            return result
        lse = checked_lse(result)
        return Result(_edited(problem, result.output, lse, found), lse)

    def observe(self, problem: Problem, lenses: Sequence[Lens]) -> Observation:
        """The same with lenses; they see the weights before terms are replaced, and no masked pairs."""
        found = self._found(problem)
        problem = _masked(problem, found)
        with no_hook():
            seen = observe_problem(problem, lenses)
            if self.hook is not None:
                with torch.no_grad():
                    self.hook(finite_problem(problem), seen.lse.detach())
            return replace(seen, output=_edited(problem, seen.output, seen.lse, found))

    def _found(self, problem: Problem) -> list[_CallEdit]:
        return [found for edit in self.edits if (found := edit.of_call(problem)) is not None]


def _masked(problem: Problem, found: Sequence[_CallEdit]) -> Problem:
    """The problem without the pairs that edits mask."""
    chosen = tuple(chosen for edit in found if edit.source is None for chosen in edit.chosen)
    if not chosen:
        return problem
    without = WithoutTerms(chosen)
    return replace(problem, mask=without if problem.mask is None else problem.mask & without)


def _edited(problem: Problem, output: Tensor, lse: Tensor, found: Sequence[_CallEdit]) -> Tensor:
    for edit in found:
        output = edit.edited(problem, output, lse)
    return output


def _outer_edits() -> Sequence[_Edit]:
    """The edits of the blocks around this one.

    Raises:
        ConfigurationError: attention is computed by something else here.
    """
    current = CURRENT_HOOK.get()
    if not isinstance(current, AttentionSubstitute):
        return ()
    owner = getattr(current.compute, "__self__", None)
    if not isinstance(owner, _Editor):
        raise ConfigurationError(
            "editing stands in a block that computes attention by other code, such as regard.ring.sharded: leave it"
        )
    return owner.edits


def _source(given: TermReplacement, terms: Sequence[HeadTerms]) -> tuple[TermSource | None, Sequence[HeadTerms]]:
    """What replaces terms (None: they are masked), and the terms that it has something for."""
    match given:
        case "zero":
            return NoTerms(), terms
        case "mask":
            return None, terms
        case Patch():
            return given, [given.terms_with_partners(each) for each in terms]
        case Mapping():
            return MeanTerms(given), terms
    means = ": the mean over a text comes from mean_outputs(model, run), or mean_values" if given == "mean" else ""
    raise ConfigurationError(
        f"replace needs 'zero', 'mask', means by module, or what capture_patch returned; it is {given!r}{means}"
    )


def _check_terms(model: nn.Module, terms: Sequence[HeadTerms]) -> None:
    """Check that there are terms, of modules that exist.

    Raises:
        ConfigurationError: there are none.
    """
    if not terms or not all(isinstance(each, HeadTerms) for each in terms):
        raise ConfigurationError(f"editing needs regard.heads.HeadTerms, one or several; it was given {terms!r}")
    names = dict(model.named_modules())
    for each in terms:
        if each.module is not None and each.module not in names and each.module != type(model).__name__:
            raise ConfigurationError(f"there is no module {each.module!r}; {nearest(each.module, names)}")
