"""Reduce weights of several layers and heads to one matrix, and read files of links in the Pharaoh format."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from regard.errors import ConfigurationError, CorpusError
from regard.heads.word_alignment import SentenceLinks, parse_pharaoh
from regard.translation.corpus import read_lines


def one_map(weights: Tensor, layer: int | None = None, head: int | None = None) -> Tensor:
    """Weights [T, layers, heads, S] as one map [T, S]: of a layer and head, or the mean over those that are not chosen.

    Layers and heads count from 0. Weights that are [T, S] already stay as they are. By default it is the mean over all
    heads of all layers: a distribution that no single head need have, and that needs no choice.

    Raises:
        ConfigurationError: there is no such layer or head, or nothing was observed.

    >>> import torch
    >>> weights = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])  # one token, one layer, two heads, two source tokens
    >>> one_map(weights), one_map(weights, head=1)
    (tensor([[0.5000, 0.5000]]), tensor([[0., 1.]]))
    """
    if weights.ndim == 2 and layer is None and head is None:
        return weights
    if 0 in weights.shape[1:-1]:
        raise ConfigurationError("there are no weights to show: the translation was made with observe=False")
    sizes = (
        {"layer": 0, "head": 0} if weights.ndim == 2 else dict(zip(("layer", "head"), weights.shape[1:3], strict=True))
    )
    for (name, size), chosen in zip(sizes.items(), (layer, head), strict=True):
        if chosen is not None and not 0 <= chosen < size:
            has = f"has {size} {name}s, 0 to {size - 1}" if size else f"has one map of weights and no {name}s"
            raise ConfigurationError(f"there is no {name} {chosen}: the model {has}")
    weights = weights.mean(1) if layer is None else weights[:, layer]  # [T, heads, S]
    return weights.mean(1) if head is None else weights[:, head]


def read_pharaoh(path: str | Path, *, first: int = 0) -> list[SentenceLinks]:
    """The links of a Pharaoh file, one line a sentence pair, as `parse_pharaoh` reads each.

    `first` is the number that the file gives to the first word: 0, or 1 as in many files of gold links. The links that
    are returned count from 0. An empty line is a pair without links. The file may be gzip.

    Raises:
        CorpusError: the file cannot be read, or something in it is no link.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            found.append(parse_pharaoh(line, first=first))
        except CorpusError as error:
            raise CorpusError(f"{path}, line {number}: {error}") from None
    return found
