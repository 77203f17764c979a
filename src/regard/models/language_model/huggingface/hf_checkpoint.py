"""Read a folder with config.json and safetensors: the configuration, and the weights under our parameter names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ....errors import CheckpointError
from ....utils.other_types import path_of
from ....utils.safetensors_files import TensorFile
from ..config import GatedExpertsConfig, LanguageModelConfig, LatentAttentionConfig, LayerConfig
from ..saved_model import EXTRA, check_same, read_json
from .architectures import configuration
from .linear_tensors import without_fused_heads
from .stored_tensors import (
    MXFP4,
    StoredTensor,
    packed_shapes,
    split_fused,
    stack_experts,
    unpacked,
    without_unread_keys,
)

EDGES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "stream.inputs.norm.weight": "model.per_layer_projection_norm.weight",
    "stream.inputs.projection.weight": "model.per_layer_model_projection.weight",
    "stream.inputs.table.weight": "model.embed_tokens_per_layer.weight",
}
COPIES = {"enter": "altup_projections", "leave": "altup_unembed_projections"}
"""The maps of the copies of a token in alternating updates, stream.enter.0.* here."""
# Of a layer: blocks.0.* here, and what is around the block in stream.NAME.0.*; model.layers.0.* there.
PARTS = {
    "attention.projections.query.": "self_attn.q_proj.",
    "attention.projections.key.": "self_attn.k_proj.",
    "attention.projections.value.": "self_attn.v_proj.",
    "attention.projections.output.": "self_attn.o_proj.",
    "attention.projections.query_norm.": "self_attn.q_norm.",
    "attention.projections.key_norm.": "self_attn.k_norm.",
    "attention.sinks": "self_attn.sinks",
    "attention_residual.laurel_norm.": "laurel.post_laurel_norm.",
    "attention_residual.left.": "laurel.linear_left.",
    "attention_residual.right.": "laurel.linear_right.",
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
    "feed_forward.dense.gate.": "mlp.gate_proj.",
    "feed_forward.dense.up.": "mlp.up_proj.",
    "feed_forward.dense.down.": "mlp.down_proj.",
    "feed_forward.dense_norm.": "post_feedforward_layernorm_1.",
    "feed_forward.experts.down": "experts.down_proj",
    "feed_forward.experts.expert_scale": "router.per_expert_scale",
    "feed_forward.experts.gate_up": "experts.gate_up_proj",
    "feed_forward.experts.norm.": "pre_feedforward_layernorm_2.",
    "feed_forward.experts.router.": "router.proj.",
    "feed_forward.experts.router_scale": "router.scale",
    "feed_forward.experts_norm.": "post_feedforward_layernorm_2.",
    "feed_forward.norm_before.": "pre_feedforward_layernorm.",
    "stream.inputs.gates.gate.": "per_layer_input_gate.",
    "stream.inputs.gates.norm.": "post_per_layer_input_norm.",
    "stream.inputs.gates.projection.": "per_layer_projection.",
    "stream.scales.scale": "layer_scalar",
    "stream.updates.corrections.": "altup.correction_coefs.",
    "stream.updates.norm.": "altup.router_norm.",
    "stream.updates.predictions.": "altup.prediction_coefs.",
    "stream.updates.router.": "altup.modality_router.",
    "stream.updates.scale": "altup.correct_output_scale",
}
OF_LAYER = re.compile(r"(?:blocks\.|(stream\.(?:inputs\.gates|scales|updates)\.))(\d+)\.(.+)")
# Of latent attention, in place of those of the same name, and beside them. Without a latent, queries are q_proj's.
LATENT = {
    "attention.projections.query_down.": "self_attn.q_a_proj.",
    "attention.projections.query_norm.": "self_attn.q_a_layernorm.",
    "attention.projections.query.": "self_attn.q_b_proj.",
    "attention.projections.down.": "self_attn.kv_a_proj_with_mqa.",
    "attention.projections.norm.": "self_attn.kv_a_layernorm.",
    "attention.projections.key.": "self_attn.k_b_proj.",
    "attention.projections.value.": "self_attn.v_b_proj.",
    "attention.indexer.query.": "self_attn.indexer.wq_b.",
    "attention.indexer.key.": "self_attn.indexer.wk.",
    "attention.indexer.key_norm.": "self_attn.indexer.k_norm.",
    "attention.indexer.weights.": "self_attn.indexer.weights_proj.",
}
# Of experts whose shared network has no gate.
UNGATED = {
    "feed_forward.router.correction": "mlp.gate.e_score_correction_bias",
    "feed_forward.shared.gate.": "mlp.shared_experts.gate_proj.",
    "feed_forward.shared.up.": "mlp.shared_experts.up_proj.",
    "feed_forward.shared.down.": "mlp.shared_experts.down_proj.",
}
QUERY = "attention.projections.query."
IN_FLOAT32 = "feed_forward.router.correction"
"""What stays in float32, whatever the dtype of the others, as in transformers."""


def parts_of(config: LanguageModelConfig, layer: LayerConfig) -> dict[str, str]:
    """The names of the parts of a layer in checkpoints of transformers; a parameter takes the first that fits it.

    >>> from regard.models import language_model as lm
    >>> attention, feed_forward = lm.LatentAttentionConfig(2, latent_dim=4, rotary_dim=2), lm.GatedFeedForwardConfig(8)
    >>> layer = lm.LayerConfig()
    >>> parts = parts_of(lm.LanguageModelConfig(9, 8, (layer,), attention, feed_forward), layer)
    >>> parts["attention.projections.query."], parts["attention.projections.key."]
    ('self_attn.q_proj.', 'self_attn.k_b_proj.')
    """
    attention, others = config.attention_of(layer), {}
    if isinstance(attention, LatentAttentionConfig) and layer.linear is None:
        others |= LATENT if attention.query_latent_dim else LATENT | {QUERY: PARTS[QUERY]}
    if isinstance(config.feed_forward, GatedExpertsConfig) and not config.feed_forward.shared_gate:
        others |= UNGATED
    return others | {ours: theirs for ours, theirs in PARTS.items() if ours not in others}


def their_name(name: str, parts: Sequence[Mapping[str, str]] = ()) -> str:
    """The name of a parameter in checkpoints of transformers, by those of the parts of each layer.

    >>> their_name("blocks.3.attention.projections.query.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in EDGES:
        return EDGES[name]
    if copy := re.fullmatch(r"stream\.(enter|leave)\.(.+)", name):
        return f"model.{COPIES[copy[1]]}.{copy[2]}"
    layer = OF_LAYER.fullmatch(name)
    number, rest = (layer[2], (layer[1] or "") + layer[3]) if layer else ("", name)
    known = parts[int(number)] if parts and number else PARTS
    ours = next(part for part in known if rest == part or (part.endswith(".") and rest.startswith(part)))
    return f"model.layers.{number}.{known[ours]}{rest.removeprefix(ours)}"


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
        parts = [parts_of(self.config, layer) for layer in self.config.layers]
        theirs = {their_name(name, parts): tensor for name, tensor in needed.items()}
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
        return {
            name: self._read(their_name(name, parts), torch.float32 if name.endswith(IN_FLOAT32) else dtype)
            for name in needed
        }

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
    folder = path_of("folder", folder)
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
    tensors = _without_predictors(open_tensors(folder), config, given.get("num_nextn_predict_layers") or 0)
    tensors = without_fused_heads(without_unread_keys(tensors, config), config)
    return Checkpoint(folder, config, stack_experts(split_fused(tensors, config), config))


def _without_predictors(
    tensors: Mapping[str, StoredTensor], config: LanguageModelConfig, predictors: int
) -> dict[str, StoredTensor]:
    """The tensors without those of layers after the last one, which predict further tokens; no logit depends on them.

    A setting of the architectures that have such layers says how many; of another, it has been refused.
    """
    beyond = tuple(f"model.layers.{len(config.layers) + number}." for number in range(predictors))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(beyond)}


def open_tensors(folder: Path, auto_class: str = "AutoModelForCausalLM") -> dict[str, StoredTensor]:
    """The tensors of all files of a folder by their names there, not yet read.

    auto_class: of transformers, which loads such a folder.

    Raises:
        CheckpointError: there are no safetensors, or they are damaged.
    """
    if (folder / SINGLE).exists():
        parts = [SINGLE]
    elif (folder / INDEX).exists():
        parts = _parts(folder / INDEX)
    else:
        raise _no_safetensors(folder, auto_class)
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


def _no_safetensors(folder: Path, auto_class: str) -> CheckpointError:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        return CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to load")
    return CheckpointError(
        f"{folder} holds its weights as pickles ({', '.join(pickles)}), which can run code when they are opened: "
        f"regard never does. Where you trust them, {auto_class}.from_pretrained(folder).save_pretrained("
        "new_folder) of transformers converts them to safetensors"
    )
