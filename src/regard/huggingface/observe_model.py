"""Lenses over the attention of a whole model, while it runs."""

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

Shown = Mapping[Lens, Any]
Views = Mapping[str, list[Shown]]
"""By the name of the attention module: one entry a call, in the order of the calls; each has what each lens shows."""


class Watch:
    """What is looked at, and what was seen."""

    def __init__(self, model: nn.Module, lenses: tuple[Lens, ...]) -> None:
        self.lenses = lenses
        self.names = {module: name for name, module in model.named_modules()}
        self.views: defaultdict[str, list[Shown]] = defaultdict(list)

    def wants(self, module: nn.Module) -> bool:
        """Whether the module is part of the model that is watched."""
        return module in self.names

    def note(self, module: nn.Module, shown: Shown) -> None:
        """Keep what one call showed."""
        self.views[self.names[module]].append(shown)


_watching: ContextVar[Watch | None] = ContextVar("watching", default=None)
_watches: list[Watch] = []
"""Those of every thread. torch.compile cannot trace a ContextVar, but it compiles anew once this is not empty."""


@contextmanager
def observing(model: nn.Module, *lenses: Lens) -> Iterator[Views]:
    """Look at the weights of every attention of a model through lenses, whatever the model returns.

    `views[name][call][lens]` is what the lens shows of the attention module `name` in its first, second, ... call: a
    decoder that generates is called once for all of the prompt, and then for each token. The lenses show softmax
    weights before dropout, in float32 at least, over the keys within reach: of a static cache, those written.

    Raises:
        ConfigurationError: no lens is given, or something else than a lens.

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
    watch = Watch(model, lenses)
    token = _watching.set(watch)
    _watches.append(watch)
    try:
        yield watch.views
    finally:
        _watches.remove(watch)
        _watching.reset(token)


def watched(module: nn.Module) -> Watch | None:
    """Who looks at a module now, if anyone."""
    if torch.compiler.is_compiling() and not _watches:
        return None
    watch = _watching.get()
    return watch if watch is not None and watch.wants(module) else None
