"""Recording of a model's attention into atlases, and their display in a page or a notebook."""

from .atlas import Atlas as Atlas
from .atlas import AttentionMap as AttentionMap
from .atlas import RankedTranslation as RankedTranslation
from .atlas import TokenizedText as TokenizedText
from .kept_weights import RankedHead as RankedHead
from .kept_weights import rank_heads as rank_heads
from .notebook import show as show
from .recording import Recording as Recording
from .recording import record as record
from .recording import with_detected_roles as with_detected_roles
from .static_page import static_page as static_page
from .view_state import ViewState as ViewState

__all__ = [
    "Atlas",
    "AttentionMap",
    "RankedHead",
    "RankedTranslation",
    "Recording",
    "TokenizedText",
    "ViewState",
    "rank_heads",
    "record",
    "show",
    "static_page",
    "with_detected_roles",
]
