"""Memory for codes of keys and of values, which grows by tokens, and a tensor whose numbers are such codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .packing import BLOCK, Packing, from_words, scale_and_offset, to_words


@dataclass(frozen=True, eq=False)
class CodeRows(ABC):
    """Codes of keys, or of values, of some heads, in whole blocks of 64 tokens.

    words: int32. parameters: int32, (B, H, blocks, 64), one for each token, or (B, H, blocks, D) by channel. dim: D.
    pages: int64, the numbers of the blocks that hold the tokens, in the order of these; None: one after another.
    """

    packing: Packing
    dim: int
    words: Tensor
    parameters: Tensor
    pages: Tensor | None = None

    @staticmethod
    @abstractmethod
    def words_shape(packing: Packing, dim: int) -> tuple[int, int]:
        """The shape of the words of a block."""

    @abstractmethod
    def write_codes(self, first: int, codes: Tensor) -> None:
        """Store codes (B, H, T, D) of the tokens from one on."""

    @abstractmethod
    def read_codes(self) -> Tensor:
        """The codes of all blocks, (B, H, blocks, 64, D)."""

    @classmethod
    def allocate(cls, packing: Packing, like: Tensor, capacity: int) -> CodeRows:
        """Memory for `capacity` tokens of rows like (B, H, T, D)."""
        batch, heads, _, dim = like.shape
        blocks = -(-capacity // BLOCK)
        of_block = dim if packing.by_channel else BLOCK
        words = torch.empty(batch, heads, blocks, *cls.words_shape(packing, dim), dtype=torch.int32, device=like.device)
        parameters = torch.zeros(batch, heads, blocks, of_block, dtype=torch.int32, device=like.device)
        return cls(packing, dim, words, parameters)

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return BLOCK * self.words.shape[2]

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.words.untyped_storage().nbytes() + self.parameters.untyped_storage().nbytes()

    def write(self, first: int, rows: Tensor) -> None:
        """Store rows (B, H, T, D) from a token on; whole blocks by channel. Earlier tokens stay as they are."""
        rows = self.packing.rotate(rows.detach().float())
        if not self.packing.by_channel:
            codes, parameters = self.packing.pack(rows)
            self.parameters.flatten(2)[:, :, first : first + rows.shape[2]] = parameters
        else:
            codes, parameters = self.packing.pack(rows.unflatten(2, (-1, BLOCK)))
            begin = first // BLOCK
            self.parameters[:, :, begin : begin + parameters.shape[2]] = parameters
            codes = codes.flatten(2, 3)
        self.write_codes(first, codes)

    def read(self, first: int, length: int) -> Tensor:
        """What is read of the tokens from one to another, (B, H, T, D) in float32."""
        axis = -2 if self.packing.by_channel else -1
        begin, end = first // BLOCK, -(-length // BLOCK)
        at = slice(begin, end) if self.pages is None else self.pages[begin:end]
        part = replace(self, words=self.words[:, :, at], parameters=self.parameters[:, :, at], pages=None)
        scale, offset = (each.unsqueeze(axis) for each in scale_and_offset(part.parameters))
        rows = (self.packing.numbers(part.read_codes()) * scale + offset).flatten(2, 3)
        return self.packing.rotate(rows[:, :, first - begin * BLOCK : length - begin * BLOCK])

    def with_capacity(self, capacity: int) -> CodeRows:
        """A copy in memory for `capacity` tokens."""
        like = self.words.new_empty((*self.words.shape[:2], 0, self.dim), dtype=torch.float32)
        grown, blocks = type(self).allocate(self.packing, like, capacity), self.words.shape[2]
        kept = min(blocks, grown.words.shape[2])
        grown.words[:, :, :kept] = self.words[:, :, :kept]
        grown.parameters[:, :, :kept] = self.parameters[:, :, :kept]
        return grown

    def in_pages(self, pages: Tensor | None) -> CodeRows:
        """The same memory, read in the order of some blocks; None: one after another."""
        return replace(self, pages=pages)

    def take_rows(self, rows: Tensor) -> CodeRows:
        """Copies of these rows of the batch."""
        return replace(self, words=self.words[rows], parameters=self.parameters[rows])

    def take_tokens(self, columns: Tensor, capacity: int) -> CodeRows:
        """Copies of these tokens, whole blocks by channel: codes and parameters as they are, none is rounded again."""
        like = self.words.new_empty((*self.words.shape[:2], 0, self.dim), dtype=torch.float32)
        taken = type(self).allocate(self.packing, like, max(capacity, len(columns)))
        if self.packing.by_channel:
            blocks = columns[::BLOCK] // BLOCK
            taken.words[:, :, : len(blocks)] = self.words[:, :, blocks]
            taken.parameters[:, :, : len(blocks)] = self.parameters[:, :, blocks]
            return taken
        taken.parameters.flatten(2)[:, :, : len(columns)] = self.parameters.flatten(2)[:, :, columns]
        taken.write_codes(0, self.read_codes().flatten(2, 3)[:, :, columns])
        return taken


class KeyCodes(CodeRows):
    """Codes of keys: words (B, H, blocks, D / codes of a word, 64), whose codes are neighbouring dims."""

    @staticmethod
    def words_shape(packing: Packing, dim: int) -> tuple[int, int]:
        return dim // packing.per_word, BLOCK

    def write_codes(self, first: int, codes: Tensor) -> None:
        words = to_words(codes.unflatten(-1, (-1, self.packing.per_word)), self.packing.bits)  # (B, H, T, words)
        at = torch.arange(first, first + codes.shape[2], device=codes.device)
        self.words[:, :, at // BLOCK, :, at % BLOCK] = words.movedim(2, 0)

    def read_codes(self) -> Tensor:
        return from_words(self.words.transpose(-1, -2), self.packing.bits).flatten(-2)


class ValueCodes(CodeRows):
    """Codes of values: words (B, H, blocks, 64 / codes of a word, D), whose codes are neighbouring tokens."""

    @staticmethod
    def words_shape(packing: Packing, dim: int) -> tuple[int, int]:
        return BLOCK // packing.per_word, dim

    def write_codes(self, first: int, codes: Tensor) -> None:
        # The first word may have earlier tokens, and the last one room for later ones.
        per, bits = self.packing.per_word, self.packing.bits
        begin, filled = first // per, first % per
        batch, heads, count, dim = codes.shape
        groups = -(-(filled + count) // per)
        padded = codes.new_zeros(batch, heads, groups * per, dim)
        words = self.words.flatten(2, 3)
        if filled:
            padded[:, :, :per] = from_words(words[:, :, begin], bits).movedim(-1, 2)
        padded[:, :, filled : filled + count] = codes
        new = to_words(padded.unflatten(2, (groups, per)).transpose(-1, -2), bits)
        words[:, :, begin : begin + groups] = new

    def read_codes(self) -> Tensor:
        return from_words(self.words, self.packing.bits).transpose(-1, -2).flatten(3, 4)


@dataclass(frozen=True, eq=False)
class PackedHeads:
    """Keys, or values, of some heads: the tokens `first` to `packed` as codes, and after them some as they were.

    heads: their numbers. codes: of a cache from its first token on; None where no token is stored so.
    """

    heads: tuple[int, ...]
    codes: CodeRows | None
    first: int
    packed: int
    whole: Tensor

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return self.packed - self.first + self.whole.shape[2]

    def read(self) -> Tensor:
        """What is read of all tokens, (B, heads, N, D), in the dtype of those that are not codes."""
        if self.codes is None or self.packed == self.first:
            return self.whole
        return torch.cat([self.codes.read(self.first, self.packed).to(self.whole.dtype), self.whole], 2)

    def part(self, begin: int, end: int) -> PackedHeads:
        """The tokens from one to another, counted from `first` on."""
        codes = self.packed - self.first
        first, packed = self.first + min(begin, codes), self.first + min(end, codes)
        return replace(
            self, first=first, packed=packed, whole=self.whole[:, :, max(begin - codes, 0) : max(end - codes, 0)]
        )


class PackedTensor(Tensor):
    """Keys or values (B, H, N, D) that are stored as codes, and read by `decode` as they are.

    Any operation of torch on it gets the numbers that the codes stand for, in its dtype, as a tensor of its own; slices
    of tokens alone stay codes.

    >>> import torch
    >>> codes = KeyCodes.allocate(Packing(), torch.ones(1, 1, 2, 4), 2)
    >>> codes.write(0, torch.ones(1, 1, 2, 4))
    >>> keys = PackedTensor((PackedHeads((0,), codes, 0, 2, torch.ones(1, 1, 0, 4)),))
    >>> keys.shape, keys[:, :, 1:].shape, keys + 1
    (torch.Size([1, 1, 2, 4]), torch.Size([1, 1, 1, 4]), tensor([[[[2., 2., 2., 2.],
              [2., 2., 2., 2.]]]]))
    >>> type(keys[..., 0:, :]).__name__, type(keys[..., 1:, :]).__name__
    ('PackedTensor', 'PackedTensor')
    """

    parts: tuple[PackedHeads, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[PackedHeads]) -> PackedTensor:
        whole = parts[0].whole
        shape = whole.shape[0], sum(len(part.heads) for part in parts), parts[0].length, whole.shape[3]
        packed = Tensor._make_wrapper_subclass(cls, shape, dtype=whole.dtype, device=whole.device)
        packed.parts = tuple(parts)
        return packed

    def __init__(self, parts: Sequence[PackedHeads]) -> None:
        """The parts have all heads, each once."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PackedTensor({tuple(self.shape)}, {self.dtype}, {self.parts[0].codes and self.parts[0].codes.packing})"

    @property
    def widened(self) -> Tensor:
        """The numbers that the codes stand for, (B, H, N, D)."""
        if len(self.parts) == 1:
            return self.parts[0].read()
        heads = [head for part in self.parts for head in part.heads]
        order = torch.tensor(heads, device=self.device).argsort()
        return torch.cat([part.read() for part in self.parts], 1)[:, order]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.alias.default:  # what a slice of all tokens becomes
            return PackedTensor(args[0].parts)
        if function is torch.ops.aten.slice.Tensor and not kwargs:
            sliced = _sliced(*args)
            if sliced is not None:
                return sliced
        numbers, named = tree_map_only(PackedTensor, lambda packed: packed.widened, (args, dict(kwargs or {})))
        return function(*numbers, **named)


def _sliced(
    rows: PackedTensor, axis: int = 0, begin: int | None = None, end: int | None = None, step: int = 1
) -> PackedTensor | None:
    """A slice of tokens, or all of another axis, as codes; None of any other slice."""
    first, last, _ = slice(begin, end).indices(rows.shape[axis])
    if step == 1 and axis % 4 == 2:
        return PackedTensor([part.part(first, max(first, last)) for part in rows.parts])
    return PackedTensor(rows.parts) if step == 1 and (first, last) == (0, rows.shape[axis]) else None
