"""Records: every attention of a model caught while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import AtlasError, ConfigurationError
from ..listening import listening
from ..problem import Problem
from .atlas import Atlas
from .atlas.making import records_of
from .atlas.tokens import Pieces
from .calls import Call, Snapshots, continued, kept
from .naming import caller, kind_of
from .torch_layers import TorchLayers

Tokens = Sequence[Any] | Mapping[str, Any] | Pieces


class Recording:
    """What `record` has caught so far; `atlas` makes an atlas of it."""

    def __init__(self, model: nn.Module, *, dtype: Literal["float16", "keep"] = "float16") -> None:
        self.model, self.dtype = model, dtype
        self.calls: list[Call] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._numbers: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._snapshots = Snapshots()
        self._within: tuple[str, str] | None = None

    def hear(self, problem: Problem, lse: Tensor) -> None:
        """Keep one call; what comes from no module of the model, or has no pairs, is left out."""
        if self._within is not None:
            name, kind = self._within
        else:
            name, variables = caller(self._names)
            kind = kind_of(problem, variables)
        if not name or not problem.weights_shape.numel():
            return
        call = kept(
            problem,
            lse,
            name=name,
            number=self._numbers[name],
            kind=kind,
            snapshots=self._snapshots,
            half=self.dtype == "float16",
        )
        self._numbers[name] += 1
        last = self._last.get(name)
        more = None if last is None else continued(self.calls[last], call)
        if last is not None and more is not None:  # at once: a cache would be kept anew with each of its steps
            self.calls[last] = more
            return
        self._last[name] = len(self.calls)
        self.calls.append(call)

    def atlas(self, *, tokens: Tokens | None = None, title: str = "") -> Atlas:
        """The atlas of all that was caught: one map for each attention module, call, and sequence of the batch.

        Calls of one module that are rows of one map become one: the steps of a decoder on a cache that only grew, or
        over one source. Others stay calls of their own, in their order, with the positions that they had: those of a
        cache that drops keys, and of a beam whose hypotheses change places, where a sequence is a place in the beam.

        Args:
            tokens: a list of words, one for each position, or `Pieces`, which also tell which of them make which word;
                or a list of such lists, one for each sequence of the batch;
                or a pair of either, those of the queries' side and those of the keys', for cross-attention: there maps
                of self-attention take the side whose length is theirs, the keys' side in modules called "encoder"; or
                a mapping from names of modules, or their beginnings, to any of these. A generated text may have one
                token more than it has keys: the last one was never asked.
            title: what the atlas is called.

        Raises:
            AtlasError: nothing was caught; tokens do not fit; a mask or a bias that an atlas cannot hold.
        """
        if not self.calls:
            raise AtlasError(_nothing_caught(self.model))
        order = {name: at for at, name in enumerate(self._numbers)}
        calls = sorted(self.calls, key=lambda call: order[call.name])
        records, arrays = records_of(calls, [tokens] * len(calls))
        return Atlas(records, arrays, title)

    @contextmanager
    def _named(self, name: str, kind: str) -> Iterator[None]:
        """Whatever is heard in the block has this name and kind."""
        before, self._within = self._within, (name, kind)
        try:
            yield
        finally:
            self._within = before


@contextmanager
def record(model: nn.Module, *, dtype: Literal["float16", "keep"] = "float16") -> Iterator[Recording]:
    """Catch what every attention of a model computes in the block; no result of the model changes by a bit.

    Caught are `regard.attention` and all that calls it: our models and layers, models of transformers with
    `attn_implementation="regard"` (`regard.huggingface.swap` chooses it); and `torch.nn.MultiheadAttention`, by its
    inputs: its attention is computed a second time, with the rounding of ours, whichever path torch takes itself.
    Kept are queries, keys and log-sum-exp: memory grows with the lengths, not with their product.

    Args:
        model: the model, or the part of it, whose calls are caught; it may be called more than once.
        dtype: queries and keys are kept as "float16", or, with "keep", as they are. Of numbers too large for float16
            they are always kept as they are.

    Weights are those before dropout. Under torch.compile and torch.func nothing is caught.

    Raises:
        ConfigurationError: what is given is no `nn.Module`, or another dtype.

    >>> import torch, regard
    >>> from regard.explorer import record
    >>> layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal())
    >>> with record(torch.nn.Sequential(layer)) as recording:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> atlas = recording.atlas(tokens=["a", "b", "c"])
    >>> atlas.maps[0].name, atlas.maps[0].weights(0, slice(0, 2), slice(0, 3)).tolist()
    ('0', [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"record needs a model, a torch.nn.Module; this is a {type(model).__name__}")
    if dtype not in ("float16", "keep"):
        raise ConfigurationError(f"record keeps queries and keys as dtype 'float16' or 'keep'; it is {dtype!r}")
    recording = Recording(model, dtype=dtype)
    layers = TorchLayers(recording._names, recording._named)
    with listening(recording), layers.heard():
        yield recording


def _nothing_caught(model: nn.Module) -> str:
    seen = sorted({type(module).__name__ for module in model.modules() if "attention" in type(module).__name__.lower()})
    has = (
        f"has {', '.join(seen[:5])}, but none of them" if seen else "has no module whose class is called an attention,"
    )
    return (
        f"no attention was caught: {type(model).__name__} {has} called regard.attention or was a "
        "torch.nn.MultiheadAttention while the block ran. Call the model inside the block, not compiled; choose "
        "regard.huggingface.swap(model) for a model of transformers; elsewhere let it call "
        "regard.scaled_dot_product_attention"
    )
