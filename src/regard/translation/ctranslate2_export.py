"""Write a translator as the folder of a CTranslate2 model, by the specification that it has for Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigurationError, require
from regard.models import Transformer
from regard.models.transformer.marian_checkpoint import OUTPUT, OUTPUT_BIAS, SHARED, SOURCE, TARGET, MarianSettings
from regard.models.transformer.marian_export import marian_settings, marian_tensors
from regard.positions import SplitSinusoidal
from regard.translation.pretrained_export import (
    SOURCE_VOCABULARY,
    TARGET_VOCABULARY,
    checked_vocabularies,
    new_folder,
)
from regard.translation.search import TranslationModel
from regard.translation.vocabulary import LineVocabulary, Vocabulary

EXTRA = "ctranslate2"
"""Which extra of regard brings CTranslate2."""
_ACTIVATIONS = {"relu": "RELU", "silu": "SWISH", "swish": "SWISH", "gelu": "GELU"}


def write_ctranslate2(
    folder: Path, model: TranslationModel, vocabularies: tuple[LineVocabulary, LineVocabulary], max_positions: int
) -> None:
    """Write the folder; errors are those of `Translator.to_ctranslate2`."""
    require("ctranslate2", extra=EXTRA)
    if not isinstance(model, Transformer):
        raise ConfigurationError(f"{type(model).__name__} is no Transformer, which CTranslate2 computes")
    source, target = checked_vocabularies(vocabularies)
    settings = marian_settings(model, max_positions)
    tensors = {name: tensor.float() for name, tensor in marian_tensors(model, settings).items()}
    spec = _specification(settings, tensors)
    spec.register_source_vocabulary(_tokens(source))
    spec.register_target_vocabulary(_tokens(target))
    begin, end, unknown = target.tokens([target.special.begin, target.special.end, target.special.unknown])
    spec.config.bos_token = spec.config.decoder_start_token = begin
    spec.config.eos_token, spec.config.unk_token = end, unknown
    spec.validate()
    with new_folder(folder) as partial:
        spec.save(str(partial))
        source.save(partial / SOURCE_VOCABULARY)
        target.save(partial / TARGET_VOCABULARY)


def _tokens(vocabulary: Vocabulary) -> list[str]:
    """The piece of each id, which CTranslate2 takes and returns in place of ids."""
    pieces = vocabulary.tokens(range(len(vocabulary)))
    if twice := len(pieces) - len(set(pieces)):
        raise ConfigurationError(f"{twice} pieces of the vocabulary are spelled as others, and CTranslate2 has no ids")
    return pieces


def _specification(settings: MarianSettings, tensors: dict[str, Tensor]) -> Any:
    """The specification of a model, with its weights."""
    specs = require("ctranslate2.specs", extra=EXTRA)

    if settings.encoder.heads != settings.decoder.heads:
        raise ConfigurationError("encoder and decoder differ in their heads, and CTranslate2 needs equal ones")
    spec = specs.TransformerSpec.from_config(
        (settings.encoder.layers, settings.decoder.layers),
        settings.encoder.heads,
        pre_norm=False,
        activation=getattr(specs.common_spec.Activation, _ACTIVATIONS[settings.activation]),
    )
    table = tensors[SHARED if settings.shares_embeddings else TARGET]
    spec.encoder.embeddings[0].weight = _array(tensors.get(SOURCE, table))
    spec.decoder.embeddings.weight = _array(table)
    spec.decoder.projection.weight = _array(tensors.get(OUTPUT, table))
    spec.decoder.projection.bias = _array(tensors[OUTPUT_BIAS][0])
    positions = SplitSinusoidal(settings.dim)(torch.arange(settings.max_positions))
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.scale_embeddings = settings.dim**0.5 if settings.scale_embedding else 1.0
        stack.position_encodings.encodings = _array(positions)
        for number, layer in enumerate(stack.layer):
            prefix = f"model.{name}.layers.{number}."
            own = {of.removeprefix(prefix): tensor for of, tensor in tensors.items() if of.startswith(prefix)}
            _fill_layer(layer, own)
    return spec


def _fill_layer(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Set the weights of a layer: those of queries, keys and values as one matrix, where they read the same."""
    _fill_linear(layer.self_attention.linear[0], tensors, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    _fill_linear(layer.self_attention.linear[1], tensors, "self_attn.out_proj")
    _fill_norm(layer.self_attention.layer_norm, tensors, "self_attn_layer_norm")
    if "encoder_attn.q_proj.weight" in tensors:
        _fill_linear(layer.attention.linear[0], tensors, "encoder_attn.q_proj")
        _fill_linear(layer.attention.linear[1], tensors, "encoder_attn.k_proj", "encoder_attn.v_proj")
        _fill_linear(layer.attention.linear[2], tensors, "encoder_attn.out_proj")
        _fill_norm(layer.attention.layer_norm, tensors, "encoder_attn_layer_norm")
    _fill_linear(layer.ffn.linear_0, tensors, "fc1")
    _fill_linear(layer.ffn.linear_1, tensors, "fc2")
    _fill_norm(layer.ffn.layer_norm, tensors, "final_layer_norm")


def _fill_linear(spec: Any, tensors: dict[str, Tensor], *names: str) -> None:
    spec.weight = _array(torch.cat([tensors[f"{name}.weight"] for name in names]))
    spec.bias = _array(torch.cat([tensors[f"{name}.bias"] for name in names]))


def _fill_norm(spec: Any, tensors: dict[str, Tensor], name: str) -> None:
    spec.gamma, spec.beta = (_array(tensors[f"{name}.{part}"]) for part in ("weight", "bias"))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().numpy()
