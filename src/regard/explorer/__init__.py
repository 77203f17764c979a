"""The explorer: records of what a model attends to, kept as atlases."""

from .atlas import Atlas as Atlas
from .atlas import AttentionMap as AttentionMap
from .recording import Recording as Recording
from .recording import record as record

__all__ = ["Atlas", "AttentionMap", "Recording", "record"]
