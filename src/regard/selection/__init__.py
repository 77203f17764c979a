"""Selection of keys by content, as MoBA, DSA and NSA do: indices for `masks.chosen` and `masks.blocks`."""

from .block_gate import gated_blocks as gated_blocks
from .block_gate import landmark_blocks as landmark_blocks
from .hierarchical_search import hierarchical_blocks as hierarchical_blocks
from .lightning_index import lightning_indices as lightning_indices
from .native_sparse import native_sparse_attention as native_sparse_attention
from .native_sparse import overlapping_blocks as overlapping_blocks
from .native_sparse import selected_blocks as selected_blocks
from .sinkhorn import sinkhorn as sinkhorn
from .sinkhorn import sinkhorn_attention as sinkhorn_attention

__all__ = [
    "gated_blocks",
    "hierarchical_blocks",
    "landmark_blocks",
    "lightning_indices",
    "native_sparse_attention",
    "overlapping_blocks",
    "selected_blocks",
    "sinkhorn",
    "sinkhorn_attention",
]
