"""The exceptions of the library: every error caused by bad input is a `RegardError`, and so a `ValueError`.

A message says what was wrong, what it has, what it needs, and the mend.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class RegardError(ValueError):
    """Bad input: the parent of every error that regard raises on purpose."""


class ShapeError(RegardError):
    """Tensors with incompatible shapes."""


class DtypeError(RegardError):
    """A tensor of a dtype that the argument does not support."""


class DeviceError(RegardError):
    """Tensors on different devices, or a device that does not exist."""


class MaskError(RegardError):
    """A mask that is ambiguous or does not fit the problem."""


class KernelError(RegardError):
    """The kernel selected by name cannot compute the problem, or no kernel can."""


class ConfigurationError(RegardError):
    """A setting that is unknown, mistyped or impossible."""


class CorpusError(RegardError):
    """Parallel text that cannot be read or does not line up."""


class VocabularyError(RegardError):
    """A vocabulary that cannot be trained, loaded or used on this text."""


class CheckpointError(RegardError):
    """A saved model that is truncated, of another model, or cannot be written."""


class AtlasError(RegardError):
    """An atlas cannot be created, written or read: a recorded value is not supported, or the file is invalid."""


class PagesExhausted(RegardError):
    """A memory of pages has too few that are free; the message says which sequences hold how many."""


class RingError(RegardError, RuntimeError):
    """The processes of a ring disagree, or one of them is gone."""


class ModifiedError(RegardError, RuntimeError):
    """Something that a gradient is computed from is not as it was in the forward pass."""


class ExportError(RegardError):
    """A part of an exported model that standard operators cannot say."""


class MissingExtra(RegardError, ImportError):
    """An optional package that this feature needs is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional package, or raise `MissingExtra` with the extra of regard that installs it.

    >>> require("math", extra="plots").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # a package that is there but broken must show its own error
        package = module.split(".")[0]
        raise MissingExtra(
            f"this needs the package {package!r}, which is not installed; pip install 'regard[{extra}]' brings it"
        ) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """List the known words, the closest first, for the end of an "unknown ..." message.

    >>> nearest("additve", ["dot", "additive"])
    "did you mean 'additive'? Known: 'additive', 'dot'"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(repr(name) for name in names)}"
