"""Read a folder with config.json and safetensors: the configuration, and the weights under our parameter names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ....errors import CheckpointError
from ....utils.safetensors_files import TensorFile
from ..config import LanguageModelConfig
from ..saved_model import EXTRA, check_same, read_json
from .architectures import configuration
from .linear_tensors import without_fused_heads
from .stored_tensors import MXFP4, StoredTensor, packed_shapes, split_fused, stack_experts, unpacked

EDGES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Within a block: blocks.0.* here, model.layers.0.* there.
PARTS = {
    "attention.projections.query.": "self_attn.q_proj.",
    "attention.projections.key.": "self_attn.k_proj.",
    "attention.projections.value.": "self_attn.v_proj.",
    "attention.projections.output.": "self_attn.o_proj.",
    "attention.projections.query_norm.": "self_attn.q_norm.",
    "attention.projections.key_norm.": "self_attn.k_norm.",
    "attention.sinks": "self_attn.sinks",
    "attention.gate.gate.": "self_attn.gate_proj.",
    "attention.gate.norm.": "self_attn.gate_norm.",
    "attention.convolution.": "self_attn.conv1d.",
    "attention.beta_gate.": "self_attn.b_proj.",
    "attention.decay_gate.": "self_attn.a_proj.",
    "attention.log_decay_rates": "self_attn.A_log",
    "attention_residual.norm.": "input_layernorm.",
    "attention_residual.norm_before.": "input_layernorm.",
    "attention_residual.norm_after.": "post_attention_layernorm.",
    "feed_forward_residual.norm.": "post_attention_layernorm.",
    "feed_forward_residual.norm_before.": "pre_feedforward_layernorm.",
    "feed_forward_residual.norm_after.": "post_feedforward_layernorm.",
    "feed_forward.gate.": "mlp.gate_proj.",
    "feed_forward.up.": "mlp.up_proj.",
    "feed_forward.down.": "mlp.down_proj.",
    "feed_forward.router.": "mlp.router.",
    "feed_forward.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "feed_forward.gate_up": "mlp.experts.gate_up_proj",
    "feed_forward.down_bias": "mlp.experts.down_proj_bias",
    "feed_forward.down": "mlp.experts.down_proj",
    "feed_forward.shared.gate.": "mlp.shared_expert.gate_proj.",
    "feed_forward.shared.up.": "mlp.shared_expert.up_proj.",
    "feed_forward.shared.down.": "mlp.shared_expert.down_proj.",
    "feed_forward.shared_gate.": "mlp.shared_expert_gate.",
}


def their_name(name: str) -> str:
    """The name of a parameter in checkpoints of transformers.

    >>> their_name("blocks.3.attention.projections.query.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in EDGES:
        return EDGES[name]
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    number, rest = (block[1], block[2]) if block else ("", name)
    ours = next(part for part in PARTS if rest == part or (part.endswith(".") and rest.startswith(part)))
    return f"model.layers.{number}.{PARTS[ours]}{rest.removeprefix(ours)}"


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
BUFFERS = ("rotary_emb.inv_freq", "self_attn.masked_bias")
"""Ends of names under which old versions saved what follows from the configuration."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A configuration, and the tensors of the files by the names of the parameters of transformers."""

    folder: Path
    config: LanguageModelConfig
    tensors: Mapping[str, StoredTensor]

    def weights(self, needed: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read the parameters for a model with these names and shapes, in one dtype.

        Raises:
            CheckpointError: tensors that are missing, extra or of another shape.
        """
        theirs = {their_name(name): tensor for name, tensor in needed.items()}
        shapes = packed_shapes({name: tensor.shape for name, tensor in self.tensors.items()})
        tied = "lm_head.weight" in shapes and "lm_head.weight" not in theirs
        if tied:
            self._check_tied()
            shapes.pop("lm_head.weight")
        check_same(str(self.folder), shapes, {name: tensor.shape for name, tensor in theirs.items()})
        embedding = self.tensors["model.embed_tokens.weight"].read()
        dtype = embedding.dtype if dtype is None else dtype
        if not dtype.is_floating_point:
            raise CheckpointError(f"the embedding in {self.folder} is {dtype}: it needs floating-point numbers")
        return {name: self._read(their_name(name), dtype) for name in needed}

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self.tensors:
            return self.tensors[name].read().to(dtype)
        blocks, scales = (name + end for end in MXFP4)
        return unpacked(self.tensors[blocks].read(), self.tensors[scales].read(), dtype)

    def _check_tied(self) -> None:
        """Check that a tied output layer equals the embedding where both were saved."""
        names = "lm_head.weight", "model.embed_tokens.weight"
        if all(name in self.tensors for name in names):
            output, embedding = (self.tensors[name].read() for name in names)
            if torch.equal(output, embedding):
                return
        raise CheckpointError(
            f"config.json in {self.folder} says that the output layer is the embedding, but lm_head.weight holds other "
            "numbers: set tie_word_embeddings to false there if these are meant"
        )


def read_checkpoint(folder: str | os.PathLike[str], ignore: Collection[str] = ()) -> Checkpoint:
    """Open the checkpoint in a folder, without reading its tensors.

    Raises:
        CheckpointError: see `LanguageModel.from_huggingface`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: from_huggingface reads a local one and downloads nothing; "
            "huggingface_hub.snapshot_download(name) gives one"
        )
    given = read_json(folder / "config.json")
    if "model_type" not in given:
        hint = ": LanguageModel.load(folder) reads what regard saved" if "weights" in given else ""
        raise CheckpointError(f"{folder / 'config.json'} names no model_type, so transformers did not save it{hint}")
    config = configuration(given, ignore)
    tensors = without_fused_heads(_tensors(folder), config)
    return Checkpoint(folder, config, stack_experts(split_fused(tensors, config), config))


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all files of a folder by their names there."""
    if (folder / SINGLE).exists():
        parts = [SINGLE]
    elif (folder / INDEX).exists():
        parts = _parts(folder / INDEX)
    else:
        raise _no_safetensors(folder)
    found: dict[str, StoredTensor] = {}
    for part in parts:
        file = TensorFile(folder / part, extra=EXTRA)
        for name, shape in file.shapes.items():
            if not name.endswith(BUFFERS):
                found[name] = StoredTensor(shape, partial(file.read, name))
    return found


def _parts(index: Path) -> list[str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{index} needs a weight_map from tensors to files")
    outside = sorted({name for name in placed.values() if Path(name).name != name})
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file beside it")
    return sorted(set(placed.values()))


def _no_safetensors(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        return CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to load")
    return CheckpointError(
        f"{folder} holds its weights as pickles ({', '.join(pickles)}), which can run code when they are opened: "
        "regard never does. Where you trust them, AutoModelForCausalLM.from_pretrained(folder).save_pretrained("
        "new_folder) of transformers converts them to safetensors"
    )
