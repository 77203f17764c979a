"""Normalizers as JSON: those of the library by a name from one table and their numbers, others by their own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ... import normalizers
from ...core.normalizer import Normalizer, normalizer_named
from ...errors import AtlasError, ConfigurationError
from ...utils.dataclass_json import DataclassJSON

NORMALIZERS: dict[str, type[Normalizer]] = {
    kind.name: kind
    for kind in (
        normalizers.DependencyTrees,
        normalizers.Entmax,
        normalizers.Hard,
        normalizers.HashCollisions,
        normalizers.LinearChain,
        normalizers.MoChA,
        normalizers.Monotonic,
        normalizers.ProjectiveTrees,
        normalizers.ReLU,
        normalizers.Sigmoid,
        normalizers.Softpick,
        normalizers.Sparsemax,
        normalizers.StickBreaking,
        normalizers.TopScores,
    )
}
NORMALIZER_JSON = DataclassJSON(NORMALIZERS, tag="is", subject="the atlas", error=AtlasError)


def write_normalizer(normalizer: Normalizer | None, store: Callable[[Tensor], str]) -> dict[str, Any]:
    """The entries of a record for a normalizer: its name as "operator", and its numbers where it is the library's own.

    Raises:
        AtlasError: a normalizer of one's own that is not registered, or whose weights may be below 0.
    """
    if normalizer is None:
        return {"operator": "softmax"}
    if normalizer.signed:
        raise AtlasError(
            f"the weights of {normalizer!r} may be below 0, and an atlas shows weights from 0 on: look at them by "
            "regard.observe with lenses.Weights"
        )
    if type(normalizer) in NORMALIZERS.values():
        return {"operator": normalizer.name, "normalizer": NORMALIZER_JSON.encode(normalizer, store)}
    try:
        registered = normalizer_named(normalizer.name) is normalizer
    except ConfigurationError:
        registered = False
    if not registered:
        raise AtlasError(
            f"the normalizer {normalizer!r} is none that an atlas knows: pass it to regard.kernels.register_normalizer"
        )
    return {"operator": normalizer.name}


def read_normalizer(record: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Normalizer | None:
    """The normalizer of which `write_normalizer` returned the entries.

    Raises:
        AtlasError: it is none.
    """
    if "normalizer" not in record:
        try:
            return normalizer_named(record["operator"])
        except ConfigurationError as error:
            raise AtlasError(f"it has a normalizer that this program does not have: {error}") from None
    found = NORMALIZER_JSON.decode(record["normalizer"], arrays, _check)
    if not isinstance(found, Normalizer) or found.name != record["operator"]:
        raise AtlasError(f"its normalizer is {str(record['normalizer'])[:80]!r}, which is not {record['operator']!r}")
    return found


def _check(name: str, values: Mapping[str, Any]) -> None:
    """Check that the fields of a normalizer from a file are numbers, or arrays of numbers for each head.

    A chain has instead a number for each two states, or such for each head.
    """
    chain = name == normalizers.LinearChain.name
    for value in values.values():
        if isinstance(value, Tensor):
            shape = value.shape
            fits = value.is_floating_point() and (shape[-2:] == (2, 2) and len(shape) < 4 if chain else len(shape) < 2)
        else:
            fits = isinstance(value, int | float) and not chain
        if not fits:
            raise AtlasError(f"{name!r} in the atlas needs numbers; it has {str(values)[:200]}")
