"""Recording of a model's attention into atlases, and their display in a page or a notebook."""

from .atlas import Atlas as Atlas
from .atlas import AttentionMap as AttentionMap
from .atlas import RankedTranslation as RankedTranslation
from .atlas import TokenizedText as TokenizedText
from .notebook import show as show
from .recording import Recording as Recording
from .recording import record as record
from .recording import with_detected_roles as with_detected_roles
from .static_page import static_page as static_page
from .view_state import ViewState as ViewState

__all__ = [
    "Atlas",
    "AttentionMap",
    "RankedTranslation",
    "Recording",
    "TokenizedText",
    "ViewState",
    "record",
    "show",
    "static_page",
    "with_detected_roles",
]
