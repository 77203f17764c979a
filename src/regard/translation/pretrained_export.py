"""Write a translator as the folder of a `MarianMTModel`, which transformers and what reads its folders load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError, ConfigurationError
from regard.models import Transformer
from regard.models.transformer.marian_export import marian_config, marian_settings, marian_tensors
from regard.translation.checkpoint import EXTRA
from regard.translation.search import TranslationModel
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import LineVocabulary, Vocabulary
from regard.utils.atomic_files import atomic_write
from regard.utils.safetensors_files import write_tensors

SOURCE_VOCABULARY, TARGET_VOCABULARY = "source.vocabulary.json", "target.vocabulary.json"


def write_pretrained(
    folder: Path,
    model: TranslationModel,
    vocabularies: tuple[LineVocabulary, LineVocabulary],
    search: SearchSettings,
    max_positions: int,
) -> None:
    """Write the folder; config.json comes last, so that one that was not finished is no model."""
    if not isinstance(model, Transformer):
        raise ConfigurationError(f"{type(model).__name__} is no Transformer, which a MarianMTModel is")
    if not all(isinstance(vocabulary, Vocabulary) for vocabulary in vocabularies):
        raise ConfigurationError("this translator came from transformers: copy its folder")
    settings = marian_settings(model, max_positions)
    tensors = marian_tensors(model, settings)
    special = vocabularies[1].special
    ids = {"pad_token_id": special.pad, "decoder_start_token_id": special.begin, "eos_token_id": special.end}
    generation = {
        **ids,
        "bad_words_ids": [[number] for number in special.never_said],
        "num_beams": search.beam,
        "length_penalty": search.length_penalty,
        "max_length": max_positions,
        "early_stopping": False,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder} ({error.strerror})") from None
    if any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty, and what it holds would be mixed up: name another folder")
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"}, EXTRA)
    for vocabulary, name in zip(vocabularies, (SOURCE_VOCABULARY, TARGET_VOCABULARY), strict=True):
        vocabulary.save(folder / name)  # type: ignore[attr-defined]
    _write_json(folder / "generation_config.json", generation)
    none = {"bos_token_id": None, "forced_eos_token_id": None}
    _write_json(folder / "config.json", {**marian_config(settings), **ids, **none})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
