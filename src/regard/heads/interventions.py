"""What a model does when parts of its attention are switched off, one after another: effects beside weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, ShapeError
from .attention_calls import AttentionCall, listen
from .attention_edits import TermReplacement, editing
from .terms import HeadTerms

T = TypeVar("T")


class Effect(Protocol):
    """What one intervention changed: the terms that were replaced, and how much, with its sign."""

    @property
    def terms(self) -> HeadTerms: ...

    @property
    def value(self) -> float: ...


E = TypeVar("E", bound=Effect)


class Interventions(Generic[T, E]):
    """Runs of a model, each with other terms of its attention replaced: an iterable of their effects, with a length.

    The model is run once to begin with, and once for each effect, when that is asked for: so that a table can grow
    while it is computed, `for done, effect in enumerate(interventions, start=1)`, and a progress bar knows `len`.

    Args:
        model: a model that computes its attention by `regard.attention`.
        run: takes no argument, runs the model and returns what the measure compares, without autograd.
        measure: (terms, result before, result with the terms replaced) to an effect.
        terms: what is replaced, one after another; by default each head of all attention that `run` calls.
        replace: by what, as in `editing`.

    before: the result of `run` without an intervention.

    Raises:
        ConfigurationError: no attention of the model was called; and what `editing` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], T],
        measure: Callable[[HeadTerms, T, T], E],
        terms: Iterable[HeadTerms] | None = None,
        *,
        replace: TermReplacement = "zero",
    ) -> None:
        self._model, self._run, self._measure = model, run, measure
        self._replace: TermReplacement = replace
        heads: dict[str, int] = {}

        def hear(call: AttentionCall) -> None:
            heads[call.module] = call.problem.weights_shape[-3] if call.problem.heads else 1

        self.before: T = listen(model, run, hear)
        each = (HeadTerms(name, heads=[head]) for name, count in heads.items() for head in range(count))
        self.terms: tuple[HeadTerms, ...] = tuple(each) if terms is None else tuple(terms)

    def __len__(self) -> int:
        return len(self.terms)

    def __iter__(self) -> Iterator[E]:
        return map(self.effect, self.terms)

    def effect(self, terms: HeadTerms) -> E:
        """The effect of replacing some terms."""
        with torch.no_grad(), editing(self._model, terms, replace=self._replace):
            after = self._run()
        return self._measure(terms, self.before, after)


@dataclass(frozen=True)
class StateEffect:
    """How far a state moved: value = 1 - cos(before, after), and relative_distance = ‖after - before‖ / ‖before‖."""

    terms: HeadTerms
    value: float
    relative_distance: float


def state_effects(
    model: nn.Module,
    run: Callable[[], Tensor],
    terms: Iterable[HeadTerms] | None = None,
    *,
    replace: TermReplacement = "zero",
) -> Interventions[Tensor, StateEffect]:
    """How far the state of a token moves when each head of an encoder is switched off: 1 - cos(before, after).

    Arguments and errors are those of `Interventions`; `run` returns the state, such as
    `model(**inputs).last_hidden_state[0, 9]`, or states of which all numbers count.

    >>> import torch, regard
    >>> layer, x = regard.nn.Attention(regard.nn.Projections(4, num_heads=2)), torch.randn(1, 3, 4)
    >>> effects = regard.heads.state_effects(layer, lambda: layer(x)[0, 1])
    >>> len(effects), [effect.terms.heads for effect in effects]
    (2, [(0,), (1,)])
    """

    def measure(terms: HeadTerms, before: Tensor, after: Tensor) -> StateEffect:
        one, other = (of.double().flatten() for of in (before, after))
        cosine = float(torch.cosine_similarity(one, other, dim=0))
        return StateEffect(terms, 1.0 - cosine, float((other - one).norm() / one.norm()))

    return Interventions(model, run, measure, terms, replace=replace)


@dataclass(frozen=True)
class NextTokenEffect:
    """What became of the next token: value, the change of its logit less the mean of all logits, and probabilities.

    token: the one with the largest probability before. probability: what it has now. likeliest: the tokens with the
    largest probabilities now, (token, probability).
    """

    terms: HeadTerms
    value: float
    token: int
    probability: float
    likeliest: tuple[tuple[int, float], ...] = field(default=())


def next_token_effects(
    model: nn.Module,
    run: Callable[[], Tensor],
    terms: Iterable[HeadTerms] | None = None,
    *,
    replace: TermReplacement = "zero",
    likeliest: int = 5,
) -> Interventions[Tensor, NextTokenEffect]:
    """How the logit of the next token changes when each head of a language model is switched off.

    Logits count only by their differences, so that of the predicted token is taken less the mean of all.

    Arguments and errors are those of `Interventions`; `run` returns the logits (vocabulary,) of one position, such as
    `model(ids).logits[0, -1]`. likeliest: how many tokens with their probabilities each effect has.

    Raises:
        ShapeError: logits of more than one position.

    >>> import torch, regard
    >>> layer, x = regard.nn.Attention(regard.nn.Projections(4, num_heads=2)), torch.randn(1, 3, 4)
    >>> effects = regard.heads.next_token_effects(layer, lambda: layer(x)[0, -1])
    >>> effects.effect(effects.terms[0]).token == int(effects.before.argmax())
    True
    """

    def measure(terms: HeadTerms, before: Tensor, after: Tensor) -> NextTokenEffect:
        one, other = (of.double() for of in (before, after))
        token = int(one.argmax())
        change = float((other[token] - other.mean()) - (one[token] - one.mean()))
        return NextTokenEffect(terms, change, token, float(other.softmax(-1)[token]), likely_tokens(other, likeliest))

    effects = Interventions(model, run, measure, terms, replace=replace)
    if effects.before.ndim != 1:
        raise ShapeError(
            f"run returned logits of the shape {tuple(effects.before.shape)}; it needs those of one position, "
            "(vocabulary,), such as model(ids).logits[0, -1]"
        )
    return effects


def likely_tokens(logits: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The tokens with the largest probabilities, (token, probability), of logits (vocabulary,)."""
    found = logits.double().softmax(-1).topk(min(count, len(logits)))
    return tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def ranked_effects(effects: Iterable[E]) -> list[E]:
    """Effects from the largest to the smallest, by their absolute value; NaN last."""
    return sorted(effects, key=lambda effect: (effect.value != effect.value, -abs(effect.value)))


def effect_table(effects: Iterable[Effect], *, top: int | None = None) -> str:
    """A table of effects, the largest first: rank, module, heads, queries and keys, and value.

    top: how many lines; all by default.

    Raises:
        ConfigurationError: top is no number of at least 1.

    >>> from regard.heads import HeadTerms, StateEffect, effect_table
    >>> print(effect_table([StateEffect(HeadTerms("0", heads=[head]), 0.1 * head, 0.0) for head in (1, 2)]))
    rank  terms      effect
       1  0 head 2  +0.2000
       2  0 head 1  +0.1000
    """
    if top is not None and (isinstance(top, bool) or top < 1):
        raise ConfigurationError(f"top is {top!r}; it needs to be a whole number of at least 1, or None for all")
    ranked = ranked_effects(effects)
    shown = [(described_terms(effect.terms), f"{effect.value:+.4f}") for effect in ranked[:top]]
    width = max([5, *(len(terms) for terms, _ in shown)])
    values = max([6, *(len(value) for _, value in shown)])
    lines = [("rank", "terms", "effect"), *((f"{rank:4}", *each) for rank, each in enumerate(shown, start=1))]
    return "\n".join(f"{rank}  {terms:{width}}  {value:>{values}}" for rank, terms, value in lines)


def described_terms(terms: HeadTerms) -> str:
    """Terms in words, for tables.

    >>> described_terms(HeadTerms("layers.3", heads=[1], keys=[7, 8])), described_terms(HeadTerms())
    ('layers.3 head 1 keys 7 8', 'all attention')
    """
    parts: list[Any] = [terms.module or "all attention"]
    for name, numbers in (("head", terms.heads), ("query", terms.queries), ("key", terms.keys)):
        if numbers is not None:
            several = {"head": "heads", "query": "queries", "key": "keys"}[name] if len([*numbers]) > 1 else name
            parts += [several, *numbers]
    return " ".join(map(str, parts))
