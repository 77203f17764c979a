"""Layers: attention with its projections, Transformer blocks, and caches for decoding."""

from .attention_layer import Attention as Attention
from .caches import H2O as H2O
from .caches import TOVA as TOVA
from .caches import Cache as Cache
from .caches import CacheFormat as CacheFormat
from .caches import KVCache as KVCache
from .caches import LinearCache as LinearCache
from .caches import Packing as Packing
from .caches import ProjectedMemory as ProjectedMemory
from .caches import SnapKV as SnapKV
from .caches import WeighedCache as WeighedCache
from .caches import WeightPolicy as WeightPolicy
from .differential_layer import DifferentialAttention as DifferentialAttention
from .differential_layer import DifferentialAttentionV2 as DifferentialAttentionV2
from .feedforward import FeedForward as FeedForward
from .feedforward import GatedFeedForward as GatedFeedForward
from .feedforward import RMSNorm as RMSNorm
from .grouped_values import GroupedValueProjections as GroupedValueProjections
from .key_selection import KeySelection as KeySelection
from .l2_norm import L2Norm as L2Norm
from .latent_attention import LatentAttention as LatentAttention
from .latent_attention import LatentProjections as LatentProjections
from .lightning_indexer import EarlierIndexer as EarlierIndexer
from .lightning_indexer import LightningIndexer as LightningIndexer
from .linear import Linear as Linear
from .linear_attention_layer import LinearAttention as LinearAttention
from .linformer import LengthProjection as LengthProjection
from .linformer import LinformerAttention as LinformerAttention
from .multi_token_layer import MultiTokenAttention as MultiTokenAttention
from .multihead import MultiheadAttention as MultiheadAttention
from .output_gate import GatedGroupNorm as GatedGroupNorm
from .output_gate import OutputGate as OutputGate
from .path_layer import PathAttention as PathAttention
from .path_layer import PathCache as PathCache
from .performer import PerformerAttention as PerformerAttention
from .projections import Projections as Projections
from .projections import QueryProjections as QueryProjections
from .reflections import Reflections as Reflections
from .relative_layer import RelativeAttention as RelativeAttention
from .replace import SwapReport as SwapReport
from .replace import swap as swap
from .replace import swap_linear as swap_linear
from .set_blocks import CrossBlock as CrossBlock
from .set_blocks import InducedSetBlock as InducedSetBlock
from .set_blocks import PerceiverEncoder as PerceiverEncoder
from .set_blocks import PooledSet as PooledSet
from .short_convolution import ShortConvolution as ShortConvolution
from .ssru import SSRU as SSRU
from .ssru import SSRUCache as SSRUCache
from .token_shift import TokenShift as TokenShift
from .torch_conversion import block_from_torch as block_from_torch
from .torch_conversion import blocks_from_torch as blocks_from_torch
from .transformer_block import BlockCache as BlockCache
from .transformer_block import BlockObservation as BlockObservation
from .transformer_block import BranchNorm as BranchNorm
from .transformer_block import PostNorm as PostNorm
from .transformer_block import PreNorm as PreNorm
from .transformer_block import Residual as Residual
from .transformer_block import SandwichNorm as SandwichNorm
from .transformer_block import TransformerBlock as TransformerBlock
from .whole_norm import WholeNormProjections as WholeNormProjections

__all__ = [
    "H2O",
    "SSRU",
    "TOVA",
    "Attention",
    "BlockCache",
    "BlockObservation",
    "BranchNorm",
    "Cache",
    "CacheFormat",
    "CrossBlock",
    "DifferentialAttention",
    "DifferentialAttentionV2",
    "EarlierIndexer",
    "FeedForward",
    "GatedFeedForward",
    "GatedGroupNorm",
    "GroupedValueProjections",
    "InducedSetBlock",
    "KVCache",
    "KeySelection",
    "L2Norm",
    "LatentAttention",
    "LatentProjections",
    "LengthProjection",
    "LightningIndexer",
    "Linear",
    "LinearAttention",
    "LinearCache",
    "LinformerAttention",
    "MultiTokenAttention",
    "MultiheadAttention",
    "OutputGate",
    "Packing",
    "PathAttention",
    "PathCache",
    "PerceiverEncoder",
    "PerformerAttention",
    "PooledSet",
    "PostNorm",
    "PreNorm",
    "ProjectedMemory",
    "Projections",
    "QueryProjections",
    "RMSNorm",
    "Reflections",
    "RelativeAttention",
    "Residual",
    "SSRUCache",
    "SandwichNorm",
    "ShortConvolution",
    "SnapKV",
    "SwapReport",
    "TokenShift",
    "TransformerBlock",
    "WeighedCache",
    "WeightPolicy",
    "WholeNormProjections",
    "block_from_torch",
    "blocks_from_torch",
    "swap",
    "swap_linear",
]
