"""Checkpoints of Hugging Face, read from a local folder without transformers: config.json and safetensors."""

from .hf_checkpoint import Checkpoint as Checkpoint
from .hf_checkpoint import read_checkpoint as read_checkpoint

__all__ = ["Checkpoint", "read_checkpoint"]
