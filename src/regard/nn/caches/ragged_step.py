"""A ragged step: the next tokens of many sequences in one row, their keys in pages of one memory."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...attention import Observation, attention, observe
from ...backends.base import PagedKeys, TokenRuns
from ...backends.registry import BACKENDS
from ...errors import ConfigurationError
from ...kernels.validation import AttentionOptions
from ...lenses import Lens
from ...masks import Mask
from ...masks.key_spans import earliest, latest
from ...scores import ScaledDot
from .attending_cache import AttendingCache, Heads
from .buffers import check_fits
from .layer_pages import NumberPages
from .page_pool import PagedSequence
from .paged_memory import PagedMemory


@dataclass(frozen=True, eq=False)
class RaggedPart:
    """The last `count` tokens of a sequence, which stand at `token` and after it in the row of the step."""

    sequence: PagedSequence
    token: int
    count: int
    lenses: tuple[Lens, ...] = ()

    @property
    def rows(self) -> slice:
        """Where its tokens stand."""
        return slice(self.token, self.token + self.count)

    @property
    def positions(self) -> range:
        """The positions of its tokens."""
        return range(len(self.sequence) - self.count, len(self.sequence))


@dataclass(eq=False)
class RaggedStep:
    """The parts of a step, and what all its layers have in common.

    positions, slots: of all tokens, (T,): in the sequence of each, and where its keys stand in the memory. seen: of
    each part with lenses, by its number, what every layer's attention gave. known: what pages of the first layer found,
    for those of the others.
    """

    memory: PagedMemory
    parts: tuple[RaggedPart, ...]
    positions: Tensor
    slots: Tensor
    seen: dict[int, list[Observation]] = field(default_factory=dict)
    _groups: dict[object, tuple[tuple[TokenRuns, ...], tuple[int, ...]]] = field(default_factory=dict, repr=False)
    known: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        memory: PagedMemory,
        parts: Sequence[tuple[PagedSequence, int]],
        lenses: Mapping[int, Sequence[Lens]] | None = None,
    ) -> RaggedStep:
        """The step of the last `count` tokens of sequences, which `PagedSequence.extend` has taken memory for.

        lenses: by the number of a part, those on its weights.
        """
        made, token, watched = [], 0, lenses or {}
        for number, (sequence, count) in enumerate(parts):
            made.append(RaggedPart(sequence, token, count, tuple(watched.get(number, ()))))
            token += count
        positions = [position for part in made for position in part.positions]
        slots = [slot for part in made for slot in part.sequence.slots(part.positions)]
        positions, slots = (torch.tensor(numbers, device=memory.device) for numbers in (positions, slots))
        return cls(memory, tuple(made), positions, slots, {number: [] for number in watched})

    def layer(self, number: int) -> RaggedLayer:
        """The cache of a layer in this step."""
        return RaggedLayer(self, number)

    def few(self, mask: Mask | None, most: int) -> tuple[tuple[TokenRuns, ...], tuple[int, ...]]:
        """Parts of few tokens as groups with their runs of keys, and the numbers of all other parts.

        most: tokens of a group.
        """
        key = mask, most
        if key not in self._groups:
            groups: list[TokenRuns] = []
            rest: list[int] = []
            for number, part in enumerate(self.parts):
                spans = None if part.lenses or part.count > most else _spans(mask, part.positions)
                if spans is not None:
                    groups.extend(_grouped(part, spans))
                elif part.count:
                    rest.append(number)
            self._groups[key] = tuple(groups), tuple(rest)
        return self._groups[key]


class RaggedLayer(AttendingCache):
    """The keys and values of one layer in a step of many sequences: what a layer takes for its cache.

    `append` writes into the pages of the sequences, and `attend` reads those of each. All else of a layer is computed
    for each token alone, and so for the tokens of all sequences at once.

    Shapes: tokens (1, T, ·), the parts of the step one after another; positions (T,), `RaggedStep.positions`.
    """

    mask = None
    has_default_positions = False

    def __init__(self, step: RaggedStep, number: int) -> None:
        self.step, self.pages = step, step.memory.layers[number]

    @property
    def keys(self) -> Tensor:
        """(1, key heads, all rows of the memory, key dim)."""
        return self.pages.keys

    @property
    def values(self) -> Tensor:
        """(1, key heads, all rows of the memory, value dim)."""
        return self.pages.values

    @property
    def positions(self) -> Tensor:
        """Positions of the step's tokens, (T,)."""
        return self.step.positions

    @property
    def next_position(self) -> int | Tensor:
        """That of the first token of the step."""
        return self.step.positions[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's memory, which all sequences share."""
        return self.pages.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> RaggedLayer:
        """Write the keys and values of the step's tokens, (1, key heads, T, ·), into the pages of their sequences.

        Raises:
            ShapeError, DtypeError, DeviceError: others than the memory was made for.
        """
        check_fits(keys, values, self)
        self.pages.write(self.step.slots, keys, values, self.step.known)
        return self

    def evict(self) -> RaggedLayer:
        """The layer itself: pages go back when their sequence ends."""
        return self

    def reorder(self, rows: Tensor) -> RaggedLayer:
        """Refused: a step is over when its layers are.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "a step of many sequences has no batch to reorder: sequences begin alike by PagedSequence.adopt"
        )

    def attend(self, heads: Heads, options: AttentionOptions) -> tuple[Tensor, RaggedLayer]:
        """Attention of each sequence's tokens to its own keys, (1, heads, T, value dim)."""
        queries, step = heads[0], self.step
        scale = _plain_scale(queries, options)
        rest = tuple(number for number, part in enumerate(step.parts) if part.count)
        keys, values = self.keys, self.values
        native = None if scale is None or not isinstance(self.pages, NumberPages) else _reader(keys, values)
        output = queries.new_empty(*queries.shape[:3], values.shape[-1], dtype=values.dtype)
        if native is not None and scale is not None:
            most = native.most_rows // (queries.shape[1] // keys.shape[1])
            groups, rest = step.few(options.get("mask"), most)  # type: ignore[arg-type]  # `_plain_scale` checked it
            if groups:
                few, lse = native.forward(queries[0], keys[0], values[0], scale, groups)
                output = _with_sinks(few, lse, options.get("sinks")).to(values.dtype).unsqueeze(0)
        for number in rest:
            output[:, :, step.parts[number].rows] = self._attend_alone(number, queries, options)
        return output, self

    def observe(self, heads: Heads, options: AttentionOptions, *lenses: Lens) -> tuple[Observation, RaggedLayer]:
        """The same with lenses, of a step of one sequence; `RaggedStep.of(lenses=)` has those of some of several.

        Raises:
            ConfigurationError: the step has several sequences.
        """
        if len(self.step.parts) != 1:
            raise ConfigurationError(
                f"lenses look at one sequence, and the step has {len(self.step.parts)}: pass them to RaggedStep.of"
            )
        return observe(*self._alone(0, heads[0], options), *lenses, **self._own(0, options)), self

    def _attend_alone(self, number: int, queries: Tensor, options: AttentionOptions) -> Tensor:
        """The output of one part, by an ordinary call."""
        lenses, alone = self.step.parts[number].lenses, self._alone(number, queries, options)
        own = self._own(number, options)
        if not lenses:
            return attention(*alone, **own)
        seen = observe(*alone, *lenses, **own)
        self.step.seen[number].append(seen)
        return seen.output

    def _alone(self, number: int, queries: Tensor, options: AttentionOptions) -> Heads:
        """Queries, keys and values of one part; no keys before all that its mask leaves."""
        part = self.step.parts[number]
        first = _first_key(options.get("mask"), part)
        return queries[:, :, part.rows], *self.pages.of(part.sequence, first, self.step.known)

    def _own(self, number: int, options: AttentionOptions) -> AttentionOptions:
        """The options of a call for one part, at the positions of its tokens and keys."""
        part = self.step.parts[number]
        first = _first_key(options.get("mask"), part)
        if not first:
            return {**options, "query_positions": None, "key_positions": None}
        return {**options, "query_positions": part.positions, "key_positions": range(first, len(part.sequence))}


def _reader(keys: Tensor, values: Tensor) -> PagedKeys | None:
    """Who reads keys in pages where they are."""
    return next((each.paged for each in BACKENDS if each.paged is not None and each.runs(keys, values)), None)


def _plain_scale(queries: Tensor, options: AttentionOptions) -> float | None:
    """The scale of scores, where nothing but a mask of spans and sinks is in the formula; else None."""
    if any(options.get(name) is not None for name in ("bias", "softcap", "normalizer")):
        return None
    score, mask = options.get("score"), options.get("mask")
    if options.get("dropout_p") or queries.requires_grad or not isinstance(mask, Mask) or _only_span(mask) is None:
        return None
    if isinstance(score, ScaledDot) and score.scale is not None:
        return score.scale
    return queries.shape[-1] ** -0.5 if score is None or type(score) is ScaledDot else None


def _only_span(mask: Mask) -> frozenset | None:
    """The spans of keys whose intersection a mask is, for each query; None where it is none."""
    terms = mask.span_terms()
    return next(iter(terms)) if terms is not None and list(terms.values()) == [1] else None


def _spans(mask: Mask | None, positions: range) -> list[tuple[int, int]] | None:
    """The keys start..stop-1 of each query of the last positions of a sequence."""
    spans = None if mask is None else _only_span(mask)
    if spans is None:
        return None
    limits = [span(positions) for span in spans]
    starts, stops = latest(0, [start for start, _ in limits]), earliest(positions.stop, [stop for _, stop in limits])
    return list(zip(_each(starts, len(positions)), _each(stops, len(positions)), strict=True))


def _each(limit: Tensor | int, count: int) -> list[int]:
    """A limit of each of `count` rows."""
    return limit.expand(count).tolist() if isinstance(limit, Tensor) else [limit] * count


def _grouped(part: RaggedPart, spans: list[tuple[int, int]]) -> list[TokenRuns]:
    """Tokens that begin at one key, and of which each sees one key more than that before it, as one group."""
    groups, begin = [], 0
    for number in range(1, len(spans) + 1):
        start, stop = spans[begin]
        if number < len(spans) and spans[number] == (start, stop + number - begin):
            continue
        if start < stop:
            runs = tuple(part.sequence.runs(start, stop + number - 1 - begin))
            groups.append(TokenRuns(part.token + begin, number - begin, stop - start, runs))
        begin = number
    return groups


def _first_key(mask: object, part: RaggedPart) -> int:
    """The position of the first key that a token of the part sees, as far as the mask's spans tell.

    Of a part with lenses 0, so that the columns of what they show are positions.
    """
    spans = _spans(mask, part.positions) if isinstance(mask, Mask) and not part.lenses else None
    return 0 if spans is None else max(min(map(operator.itemgetter(0), spans)), 0)


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The output where one more score of each row, without a value, has joined the softmax."""
    return output if sinks is None else output * torch.sigmoid(lse - sinks.float().unsqueeze(-1)).unsqueeze(-1)
