"""Roles of an atlas's heads, found in its own weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..heads import Roles, look
from .atlas import Atlas, AttentionMap

LONGEST = 1024
"""Longer maps keep the roles that they have: their weights would have to be computed whole."""


def with_roles_found(atlas: Atlas) -> Atlas:
    """The same atlas, its short maps of self-attention with the roles whose rules their heads meet.

    The rules are those of `regard.heads.text_roles`, each with its score and how many rows were counted. Maps of
    cross-attention, with more than LONGEST keys, or whose queries are not the last of the keys keep what they have.

    >>> weights = torch.eye(40)[torch.arange(40).sub(1).clamp(min=0)]
    >>> found = with_roles_found(Atlas.from_weights({"head": weights[None]}, tokens=[str(i) for i in range(40)]))
    >>> [role["name"] for role in found.maps[0].roles[0]]
    ['previous token']
    """
    return atlas.with_roles([_found(of) if _fits(of) else of.roles for of in atlas.maps])


def _fits(of: AttentionMap) -> bool:
    last = of.key_positions[len(of.key_positions) - of.queries :] if of.queries <= of.keys else None
    return of.kind == "self" and of.keys <= LONGEST and last is not None and np.array_equal(of.query_positions, last)


def _found(of: AttentionMap) -> list[list[dict[str, Any]]]:
    everything = slice(0, of.queries), slice(0, of.keys)
    weights, exists = (
        torch.from_numpy(np.stack([tell(head, *everything) for head in range(of.heads)]))[None]
        for tell in (of.weights, of.exists)
    )
    lens = Roles(list(of.key_tokens))
    return [[finding.to_dict() for finding in found] for found in look(weights, lens, mask=exists)[lens].holding()]
