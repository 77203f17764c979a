"""Layers: attention with all that goes around it, the blocks of a Transformer, and caches for decoding."""

from .attention import Attention as Attention
from .blocks import BlockCache as BlockCache
from .blocks import SeenBlock as SeenBlock
from .blocks import TransformerBlock as TransformerBlock
from .caches import KVCache as KVCache
from .caches import MemoryCache as MemoryCache
from .feedforward import FeedForward as FeedForward
from .feedforward import GatedFeedForward as GatedFeedForward
from .latent import LatentAttention as LatentAttention
from .latent import LatentProjections as LatentProjections
from .linear import Linear as Linear
from .multihead import MultiheadAttention as MultiheadAttention
from .normalization import RMSNorm as RMSNorm
from .projections import Projections as Projections
from .residual import PostNorm as PostNorm
from .residual import PreNorm as PreNorm
from .residual import Residual as Residual
from .residual import SandwichNorm as SandwichNorm
from .swapping import Swapped as Swapped
from .swapping import swap as swap
from .swapping import swap_linear as swap_linear

__all__ = [
    "Attention",
    "BlockCache",
    "FeedForward",
    "GatedFeedForward",
    "KVCache",
    "LatentAttention",
    "LatentProjections",
    "Linear",
    "MemoryCache",
    "MultiheadAttention",
    "PostNorm",
    "PreNorm",
    "Projections",
    "RMSNorm",
    "Residual",
    "SandwichNorm",
    "SeenBlock",
    "Swapped",
    "TransformerBlock",
    "swap",
    "swap_linear",
]
