"""The explorer: records of what a model attends to, kept as atlases."""

from .atlas import Atlas as Atlas
from .atlas import AttentionMap as AttentionMap
from .atlas import Hypothesis as Hypothesis
from .atlas import Pieces as Pieces
from .notebook import show as show
from .recording import Recording as Recording
from .recording import record as record
from .recording import with_roles_found as with_roles_found
from .static_page import static_page as static_page
from .view_state import State as State

__all__ = [
    "Atlas",
    "AttentionMap",
    "Hypothesis",
    "Pieces",
    "Recording",
    "State",
    "record",
    "show",
    "static_page",
    "with_roles_found",
]
