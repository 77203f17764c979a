"""Write a translator as the folder of a `MarianMTModel`, which transformers and what reads its folders load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
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
    """Write the folder; errors are those of `Translator.to_huggingface`."""
    if not isinstance(model, Transformer):
        raise ConfigurationError(f"{type(model).__name__} is no Transformer, which a MarianMTModel is")
    checked = checked_vocabularies(vocabularies)
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
    none = {"bos_token_id": None, "forced_eos_token_id": None}
    with new_folder(folder) as partial:
        write_tensors(partial / "model.safetensors", tensors, {"format": "pt"}, EXTRA)
        for vocabulary, name in zip(checked, (SOURCE_VOCABULARY, TARGET_VOCABULARY), strict=True):
            vocabulary.save(partial / name)
        _write_json(partial / "generation_config.json", generation)
        _write_json(partial / "config.json", {**marian_config(settings), **ids, **none})


def checked_vocabularies(vocabularies: tuple[LineVocabulary, LineVocabulary]) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of a translator that was made here.

    Raises:
        ConfigurationError: they are those of a model of transformers, or of Marian.
    """
    source, target = vocabularies
    if not isinstance(source, Vocabulary) or not isinstance(target, Vocabulary):
        raise ConfigurationError("this translator came from transformers or Marian: copy its folder")
    return source, target


def check_new_folder(folder: Path) -> None:
    """Check that a folder is not there, or is empty.

    Raises:
        CheckpointError: it holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty, and what it holds would be mixed up: name another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder that is there when the block has filled it, and not at all where it raises.

    Raises:
        CheckpointError: there is one that holds something, or it cannot be made.
    """
    try:
        check_new_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(mkdtemp(prefix=f".{folder.name[:40]}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder} ({error.strerror})") from None
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        if folder.exists():
            folder.rmdir()
        partial.replace(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write the folder {folder} ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    """The permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
