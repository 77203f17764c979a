"""The inputs of the first block: checks of tokens and caches, positions, and the rotations of each layer."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from ...core.torch_modes import under_transform
from ...errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from ...nn.input_checks import check_positions
from ...positions import Rotary, Rotation
from .language_model_cache import LanguageModelCache


def check_tokens(tokens: Tensor, vocabulary_size: int, device: torch.device) -> None:
    """Check tokens (batch, length); their values only on a CPU, for elsewhere the embedding itself raises.

    Raises:
        ShapeError, DtypeError, DeviceError: they are not that.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        has = tokens.dtype if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        raise DtypeError(f"tokens need a tensor of whole numbers, torch.int64 for instance; this is {has}")
    if tokens.ndim != 2:
        hint = ": give tokens.unsqueeze(0) where there is no batch" if tokens.ndim == 1 else ""
        raise ShapeError(f"tokens have the shape {tuple(tokens.shape)}; they need (batch, length){hint}")
    if tokens.device != device:
        raise DeviceError(
            f"tokens are on {tokens.device}, but the model is on {device}: move one of them with .to(device)"
        )
    if tokens.device.type == "cpu" and tokens.numel() and not under_transform():
        least, most = (int(end) for end in tokens.aminmax())
        if least < 0 or most >= vocabulary_size:
            raise ShapeError(
                f"tokens are in {least}..{most}, but the vocabulary has {vocabulary_size}: they need to be in "
                f"0..{vocabulary_size - 1}; these come from another tokenizer, or mark what does not count in a loss"
            )


def stop_tokens(stop: int | Collection[int], vocabulary_size: int) -> tuple[int, ...]:
    """The tokens that end a sequence, sorted, after a check that the vocabulary has each.

    Raises:
        ConfigurationError: they are not that.

    >>> stop_tokens({7, 2}, vocabulary_size=9)
    (2, 7)
    """
    try:
        tokens = sorted({operator.index(token) for token in (stop if isinstance(stop, Collection) else (stop,))})
    except TypeError:
        raise ConfigurationError(
            f"stop is {stop!r}; it needs a token, or several: whole numbers in 0..{vocabulary_size - 1}"
        ) from None
    if outside := [token for token in tokens if not 0 <= token < vocabulary_size]:
        raise ConfigurationError(
            f"stop has the token {outside[0]}, but the vocabulary has {vocabulary_size}, 0..{vocabulary_size - 1}: it "
            "would never come; this one is from another tokenizer"
        )
    return tuple(tokens)


def check_cache(cache: object, layers: int) -> None:
    """Check that a cache is that of a model with this number of layers.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(cache, LanguageModelCache) or len(cache.layers) != layers:
        has = f" of {len(cache.layers)} layers" if isinstance(cache, LanguageModelCache) else ""
        raise ConfigurationError(
            f"step needs a LanguageModelCache of {layers} layers, as model.make_cache() gives; it was given a "
            f"{type(cache).__name__}{has}"
        )


def token_positions(tokens: Tensor, positions: Tensor | None, cache: LanguageModelCache | None) -> Tensor:
    """The positions of the tokens: those passed, or those after the cache, or 0..length-1."""
    batch, length = tokens.shape
    if positions is not None:
        check_positions("positions", positions, batch, length)
        return positions
    return torch.arange(length, device=tokens.device) if cache is None else cache.next_positions(length, tokens.device)


def shared_rotations(rotaries: Iterable[Rotary | None], at: Tensor, dtype: torch.dtype) -> list[Rotation | None]:
    """The rotation of each layer at these positions, computed once for all layers whose rotary is equal."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    made: dict[Rotary, Rotation] = {}
    rotations: list[Rotation | None] = []
    for rotary in rotaries:
        if rotary is not None and rotary not in made:
            made[rotary] = rotary.rotation(at, dtype=dtype)
        rotations.append(None if rotary is None else made[rotary])
    return rotations
