"""Roles of an atlas's heads, found in its own weights."""

from __future__ import annotations

from .atlas import Atlas
from .atlas.finding import roles_of_map


def with_roles_found(atlas: Atlas) -> Atlas:
    """The same atlas, its maps of self-attention with the roles whose rules their heads meet.

    The rules are those of `regard.heads.text_roles`, each with its score and how many rows were counted. Maps that have
    been told roles, as a record does where it is given tokens, keep what they have; so do those of cross-attention, and
    those whose queries are not the last of the keys. Of long texts some 512 rows are looked at, in strips all along
    them. Memory is linear in the lengths, of `Atlas.from_weights` that of one head's weights.

    >>> import torch
    >>> weights = torch.eye(40)[torch.arange(40).sub(1).clamp(min=0)]
    >>> found = with_roles_found(Atlas.from_weights({"head": weights[None]}, tokens=[str(i) for i in range(40)]))
    >>> [role["name"] for role in found.maps[0].roles[0]]
    ['previous token']
    """
    roles = [None if of.record.get("roles") else roles_of_map(of) for of in atlas.maps]
    return atlas.with_roles([of.roles if found is None else found for of, found in zip(atlas.maps, roles, strict=True)])
