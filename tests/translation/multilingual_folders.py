"""Folders of M2M100, NLLB, mBART and T5 as transformers saves them, small and random, with tokenizers trained here."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from marian_folders import SENTENCES
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import Unigram
from tokenizers.trainers import UnigramTrainer
from torch import nn
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    MT5Config,
    MT5ForConditionalGeneration,
    NllbTokenizer,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

BART_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 48,
}
T5_SIZES = {"d_model": 32, "d_kv": 10, "d_ff": 56, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
LANGUAGES = {
    "m2m": ("en", "fr"),
    "nllb": ("eng_Latn", "fra_Latn"),
    "nllb_legacy": ("eng_Latn", "fra_Latn"),
    "mbart": ("en_XX", "fr_XX"),
    "mbart50": ("en_XX", "fr_XX"),
}
"""The two languages of each kind that is told both."""


def sentencepiece_model(kind: str = "bpe") -> bytes:
    """A SentencePiece model that is trained on SENTENCES."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=written, vocab_size=70, model_type=kind, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return written.getvalue()


def unigram_pieces(size: int = 80) -> list[tuple[str, float]]:
    """Pieces with their scores, learned from SENTENCES."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(SENTENCES, UnigramTrainer(vocab_size=size, show_progress=False))
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    return [(piece, score) for piece, score in pieces if piece != "<unk>"]


def bpe_tokenizer(legacy: bool) -> NllbTokenizer:
    """A tokenizer of NLLB: merges that are learned, and its languages."""
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(SENTENCES, BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    source, target = LANGUAGES["nllb"]
    return NllbTokenizer(model["vocab"], merges, src_lang=source, tgt_lang=target, legacy_behaviour=legacy)


def m2m_tokenizer(folder: Path) -> M2M100Tokenizer:
    """A tokenizer of M2M100: a SentencePiece model of byte pairs, and ids of its own."""
    import sentencepiece

    folder.mkdir(parents=True)
    model = folder / "one.model"
    model.write_bytes(sentencepiece_model())
    pieces = sentencepiece.SentencePieceProcessor(str(model))
    names = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(3, len(pieces)))]
    (folder / "one.json").write_text(json.dumps({name: i for i, name in enumerate(names)}), encoding="utf-8")
    return M2M100Tokenizer(str(folder / "one.json"), str(model), src_lang="en", tgt_lang="fr")


def make_tokenizer(kind: str, folder: Path) -> Any:
    """The tokenizer of a kind, and how many ids its model needs."""
    if kind == "m2m":
        return m2m_tokenizer(folder)
    if kind.startswith("nllb"):
        return bpe_tokenizer(kind == "nllb_legacy")
    pieces, source, target = unigram_pieces(), "en_XX", "fr_XX"
    if kind == "mbart50":
        sentencepiece_form = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces]
        return MBart50Tokenizer(sentencepiece_form, src_lang=source, tgt_lang=target)
    if kind == "mbart":
        special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        return MBartTokenizer([*special, *pieces], src_lang=source, tgt_lang=target)
    marks = [("<2fr>", 0.0), ("<2de>", 0.0)] if kind == "madlad" else []
    return T5Tokenizer([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *marks, *pieces], extra_ids=0)


def make_model(kind: str, size: int, **changes: Any) -> PreTrainedModel:
    """A model of random numbers for a kind of tokenizer, norms and biases included."""
    torch.manual_seed(11)
    if kind == "m2m" or kind.startswith("nllb"):
        model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=size, **{**BART_SIZES, **changes}))
    elif kind.startswith("mbart"):
        start = {} if kind == "mbart" else {"decoder_start_token_id": 2}
        model = MBartForConditionalGeneration(MBartConfig(vocab_size=size, **{**BART_SIZES, **start, **changes}))
    elif kind == "mt5":
        model = MT5ForConditionalGeneration(MT5Config(vocab_size=size, **{**T5_SIZES, **changes}))
    else:
        start = {"decoder_start_token_id": 0}
        model = T5ForConditionalGeneration(T5Config(vocab_size=size, **{**T5_SIZES, **start, **changes}))
    if changes.get("tie_word_embeddings") is False:  # which T5 ties until the file holds two tables
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn_like(buffer))
    return model.eval()


def write_translator(
    folder: Path, kind: str, *, generation: Mapping[str, Any] = {}, **changes: Any
) -> tuple[PreTrainedModel, Any]:
    """Write a random model of a kind with its tokenizer, and return both."""
    tokenizer = make_tokenizer(kind, folder / "parts")
    size = max(tokenizer.get_vocab().values()) + 1
    if kind == "m2m":
        size = max(tokenizer.lang_code_to_id.values()) + 1 + 8  # and words that were made up
    model = make_model(kind, size, **changes)
    for name, value in {"max_length": 24, "num_beams": 1, **generation}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def language_id(tokenizer: Any, code: str) -> int:
    """The id of a language."""
    return tokenizer.get_lang_id(code) if hasattr(tokenizer, "get_lang_id") else tokenizer.convert_tokens_to_ids(code)


def generation_options(kind: str, tokenizer: Any) -> dict[str, int]:
    """What `generate` of transformers is told so that it says the target language."""
    if kind not in LANGUAGES:
        return {}
    name = "decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id"
    return {name: language_id(tokenizer, LANGUAGES[kind][1])}
