"""Autoregressive generation, token by token: greedy, or sampled with temperature, top-k and top-p."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigurationError, DtypeError, ShapeError
from ...masks import Mask, prefix
from ...utils.numbers import lies_between, truth_value, whole_number
from ...utils.other_types import needs_tensor
from .language_model_cache import LanguageModelCache, Steps
from .next_tokens import CapturedStep, NextTokens

PROMPT_CHUNK = 1024
"""Prompt tokens per forward pass: enough for matrix products to run at their full rate, with little memory."""


@dataclass(frozen=True)
class Sampling:
    """Sample from softmax(logits / temperature), among the `top_k` likeliest tokens and those that sum to `top_p`.

    `top_p` keeps the smallest set whose probability is at least top_p (Holtzman et al. 2020, arXiv 1904.09751, section
    3.1), after `top_k` has left the others out. The likeliest token always stays.

    Raises:
        ConfigurationError: a number out of its range.

    >>> drawn = Sampling(top_k=1)(torch.tensor([[0.0, 2.0, 1.0]]), torch.Generator().manual_seed(0))
    >>> drawn
    tensor([1])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not lies_between(0, self.temperature, float("inf")):
            raise ConfigurationError(
                f"temperature is {self.temperature!r}; it needs a finite number above 0. Without sampling= the "
                "likeliest token is taken"
            )
        if self.top_k is not None:
            whole_number("top_k", self.top_k)
        if self.top_p is not None and not (
            lies_between(0, self.top_p, 1) or (self.top_p == 1 and self.top_p is not True)
        ):
            raise ConfigurationError(f"top_p is {self.top_p!r}; it needs a probability in (0, 1]")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample tokens (batch,) from logits (batch, vocabulary)."""
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities that are sampled from: (batch, vocabulary), 0 for tokens that are excluded."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p is not None:
            falling, order = logits.sort(dim=-1, descending=True, stable=True)
            chances = falling.softmax(-1)
            above = chances.cumsum(-1) - chances  # of all that is likelier
            gone = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, above >= self.top_p)
            logits = logits.masked_fill(gone, float("-inf"))
        return logits.softmax(-1)


def generated(
    model: Steps,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    lengths: Tensor | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    chunk: int | None,
    captured: bool = False,
    cache: LanguageModelCache | None = None,
) -> Iterator[Tensor]:
    """Generate tokens as `LanguageModel.generate`; arguments are checked before the first token is computed."""
    if refused := needs_tensor("tokens", tokens):
        raise DtypeError(refused)
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ShapeError(
            f"tokens have the shape {tuple(tokens.shape)}; generate needs (batch, length) with one token at least to "
            "go on from"
        )
    count = whole_number("max_new_tokens", max_new_tokens, least=0)
    size = tokens.shape[1] if chunk is None else whole_number("chunk", chunk)
    stops = torch.tensor(stop, dtype=tokens.dtype, device="cpu").to(tokens.device, non_blocking=True)
    captured = truth_value("captured", captured)
    mask, positions = _left_padded(tokens, lengths)
    start = model.make_cache() if cache is None else cache
    if start.is_used:
        mask = _mask_of_continued(start, positions)
    choose = _choosing(sampling, generator)

    def stream() -> Iterator[Tensor]:
        if not count:
            return
        with torch.no_grad():
            features, cache = tokens.new_zeros(0), start
            for begin in range(0, tokens.shape[1], size):
                here = None if positions is None else positions[:, begin : begin + size]
                part = tokens[:, begin : begin + size]
                features, cache = model.next_features(part, cache, mask=mask, positions=here)
            chosen = choose(model.logits(features[:, -1:])[:, 0])
        state = NextTokens(model, cache, chosen, stops, mask, choose)
        step = CapturedStep(state, count - 1, generator) if captured else state
        for number in range(1, count + 1):
            yield state.tokens.clone()
            if number == count or state.all_done():
                return
            with torch.no_grad():
                step.step()

    return stream()


def check_sampling(sampling: object) -> None:
    """Check that a value is a way to draw tokens, or None.

    Raises:
        ConfigurationError: it is neither.
    """
    if sampling is not None and (isinstance(sampling, type) or not callable(sampling)):
        raise ConfigurationError(
            f"sampling is {sampling!r}; it needs a Sampling(temperature=..., top_k=..., top_p=...), or None for the "
            "likeliest token"
        )


def _choosing(sampling: Sampling | None, generator: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    check_sampling(sampling)
    if sampling is None:
        return lambda logits: logits.argmax(-1)
    if not isinstance(generator, torch.Generator | None):
        raise ConfigurationError(
            f"generator is {generator!r}; it needs a torch.Generator, such as torch.Generator().manual_seed(0)"
        )
    return lambda logits: sampling(logits, generator)


def _left_padded(tokens: Tensor, lengths: Tensor | Sequence[int] | None) -> tuple[Mask | None, Tensor | None]:
    """The mask and positions of a batch padded on the left: padding is below position 0, and no token attends to it."""
    if lengths is None:
        return None, None
    batch, length = tokens.shape
    if not isinstance(lengths, Tensor):
        try:
            lengths = torch.tensor([operator.index(count) for count in lengths])
        except TypeError:
            raise ShapeError(
                f"lengths is {lengths!r}; it needs a whole number for each of the {batch} sequences, as a tensor or a "
                "list: how many tokens at its right end are not padding"
            ) from None
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ShapeError(
            f"lengths is {lengths.dtype} {tuple(lengths.shape)}; it needs a whole number for each of the {batch} "
            "sequences: how many tokens at its right end are not padding"
        )
    if int(lengths.min()) < 1 or int(lengths.max()) > length:
        raise ShapeError(f"lengths are {lengths.tolist()}; they need to be in 1..{length}, the length of the batch")
    if bool((lengths == length).all()):
        return None, None
    positions = torch.arange(length, device=tokens.device) - length + lengths.to(tokens.device).unsqueeze(-1)
    if _looks_padded_right(tokens, positions):
        warnings.warn(
            "the tokens look padded on the right, but the lengths of generate count from the end of each sequence, so "
            "that its padding is on the left: pad there, as a tokenizer with padding_side='left' does",
            stacklevel=4,
        )
    return ~prefix(0), positions


def _mask_of_continued(cache: LanguageModelCache, positions: Tensor | None) -> Mask | None:
    """The mask for tokens that continue the text of a cache, whose padding is below position 0.

    Raises:
        ConfigurationError: the tokens have padding of their own.
    """
    if positions is not None:
        raise ConfigurationError(
            "lengths are of texts from their beginning, but the cache holds a text that the tokens continue: pass "
            "sequences of one length with it"
        )
    return ~prefix(0) if isinstance(cache.next_position, Tensor) else None


def _looks_padded_right(tokens: Tensor, positions: Tensor) -> bool:
    """Whether one token fills the columns after each sequence's length, and several fill those before its text."""
    before, after = tokens[positions < 0], tokens[positions.flip(-1) < 0]
    return bool((after == after[0]).all()) and not bool((before == before[0]).all())
