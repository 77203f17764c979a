"""Context manager that applies lenses to every attention call of a transformers model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..lenses import Lens

LensResults = Mapping[Lens, Any]
Views = Mapping[str, list[LensResults]]
"""By name of the attention module: the results of all lenses for each call, in the order of the calls."""


class ModelObserver:
    """The lenses of each module, and their results by the module's name. lenses: by name, for those to observe."""

    def __init__(self, model: nn.Module, lenses: Mapping[str, tuple[Lens, ...]]) -> None:
        self.names = {module: name for name, module in model.named_modules() if name in lenses}
        self._lenses = lenses
        self.views: defaultdict[str, list[LensResults]] = defaultdict(list)

    def includes(self, module: nn.Module) -> bool:
        """Whether the module is observed."""
        return module in self.names

    def lenses(self, module: nn.Module) -> tuple[Lens, ...]:
        """The lenses of a module that is observed."""
        return self._lenses[self.names[module]]

    def add(self, module: nn.Module, results: LensResults) -> None:
        """Store the results of one call."""
        self.views[self.names[module]].append(results)


_current: ContextVar[ModelObserver | None] = ContextVar("model_observer", default=None)
_observers: list[ModelObserver] = []
"""Observers of all threads. torch.compile cannot trace a ContextVar, but it recompiles once this is not empty."""


@contextmanager
def observing(model: nn.Module, *lenses: Lens) -> Iterator[Views]:
    """Apply lenses to the weights of every attention call of a model, whatever the model returns.

    `views[name][call][lens]` is the result of a lens for the attention module `name` in its first, second, ... call: a
    decoder that generates is called once for the prompt, and then for each token. The weights are those before dropout,
    in float32 at least, over the keys that can be attended to: of a static cache, the written ones.

    Raises:
        ConfigurationError: no lens, or something else than a lens; a model none of whose attention modules uses regard.

    >>> import torch, regard.huggingface
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = BertModel(config).eval()
    >>> _ = regard.huggingface.swap(model)
    >>> first = regard.lenses.Weights(rows=slice(0, 1))
    >>> with regard.huggingface.observing(model, first) as views:
    ...     _ = model(torch.arange(5)[None])
    >>> [(name, calls[0][first].shape) for name, calls in views.items()]
    [('encoder.layer.0.attention.self', torch.Size([1, 2, 1, 5]))]
    """
    if not lenses or not all(isinstance(lens, Lens) and not isinstance(lens, type) for lens in lenses):
        raise ConfigurationError(
            f"observing needs a model and at least one lens, such as regard.lenses.Weights(); the lenses are {lenses!r}"
        )
    from .register import check_uses_regard  # which imports the attention function, and that this module

    check_uses_regard(model)
    with observing_modules(model, {name: lenses for name, _ in model.named_modules()}) as views:
        yield views


@contextmanager
def observing_modules(model: nn.Module, lenses: Mapping[str, tuple[Lens, ...]]) -> Iterator[Views]:
    """As `observing`, with lenses for some modules alone, by name: the others compute without any."""
    observer = ModelObserver(model, lenses)
    token = _current.set(observer)
    _observers.append(observer)
    try:
        yield observer.views
    finally:
        _observers.remove(observer)
        _current.reset(token)


def active_observer(module: nn.Module) -> ModelObserver | None:
    """The observer of a module, None where it is not observed."""
    if torch.compiler.is_compiling() and not _observers:
        return None
    observer = _current.get()
    return observer if observer is not None and observer.includes(module) else None
