"""Folders of Marian models as transformers saves them, small and random, with a tokenizer that is trained here."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import UnigramTrainer
from transformers import MarianConfig, MarianMTModel

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "I am tired, and you are not.",
    "Where is the station? It is behind the house.",
    "We have seven brown dogs and two houses.",
    "Is the dog lazy? No, he is quick!",
] * 3


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a Protocol Buffers message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """A whole number in groups of 7 bits, the lowest first."""
    groups = [value & 127]
    while value := value >> 7:
        groups.append(value & 127)
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def spm(
    pieces: list[tuple[str, float]], *, trainer: bytes = b"", normalizer: bytes = b"", kinds: Mapping[str, int] = {}
) -> bytes:
    """A SentencePiece model of these pieces."""
    special = [("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
    lines = [*special, *((piece, score, kinds.get(piece, 1)) for piece, score in pieces)]
    body = b"".join(
        field(1, field(1, piece.encode()) + field(2, float(score)) + field(3, kind)) for piece, score, kind in lines
    )
    return body + field(2, trainer) + field(3, normalizer)


def trained_pieces(size: int = 90) -> list[tuple[str, float]]:
    """Unigram pieces with their scores, learned from SENTENCES."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.train_from_iterator(SENTENCES, UnigramTrainer(vocab_size=size, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]["vocab"]
    return [(piece, score) for piece, score in model]


def marian_config(size: int, **changes: Any) -> MarianConfig:
    """A small configuration of the kind that OPUS-MT's models have."""
    settings = {
        "vocab_size": size,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 56,
        "decoder_ffn_dim": 56,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": size - 1,
        "decoder_start_token_id": size - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "max_position_embeddings": 48,
    }
    return MarianConfig(**{**settings, **changes})


def random_model(config: MarianConfig, scale: float = 0.2) -> MarianMTModel:
    """A model of random numbers, its output bias and norms included."""
    torch.manual_seed(7)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                noise = torch.randn_like(parameter) * scale
                parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


def write_folder(folder: Path, *, generation: Mapping[str, Any] = {}, **changes: Any) -> MarianMTModel:
    """Write a random model with its vocabulary, and return the model."""
    pieces = trained_pieces()
    names = ["</s>", "<unk>", *(piece for piece, _ in pieces if piece != "<unk>"), ">>fra<<", ">>deu<<", "<pad>"]
    model = random_model(marian_config(len(names), **changes))
    for name, value in {"bad_words_ids": [[len(names) - 1]], "max_length": 24, "num_beams": 1, **generation}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(names)}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": False}), encoding="utf-8")
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(spm([one for one in pieces if one[0] != "<unk>"]))
    return model
