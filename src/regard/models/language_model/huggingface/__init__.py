"""Checkpoints of Hugging Face, read from a local folder without transformers: config.json and safetensors."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import read_checkpoint as read_checkpoint

__all__ = ["Checkpoint", "read_checkpoint"]
