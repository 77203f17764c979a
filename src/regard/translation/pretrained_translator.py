"""Read a translator that transformers saved, by the type of its model."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from regard.errors import CheckpointError, nearest
from regard.models.language_model.saved_model import read_json
from regard.translation.marian_translator import read_marian
from regard.translation.multilingual_translator import read_multilingual
from regard.translation.pretrained_parts import UNCHOSEN, Languages, PretrainedTranslator
from regard.translation.t5_translator import read_t5

_READERS = {
    "m2m_100": read_multilingual,
    "marian": read_marian,
    "mbart": read_multilingual,
    "mt5": read_t5,
    "t5": read_t5,
}


def is_pretrained(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is one that transformers saved, and not that of a run."""
    folder = Path(folder)
    return (folder / "config.json").is_file() and not (folder / "experiment.yaml").exists()


def is_translator(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder that transformers saved has a model of a kind of translators that is read here."""
    return read_json(Path(folder) / "config.json").get("model_type") in _READERS


def read_pretrained(
    folder: Path, languages: Languages = UNCHOSEN, ignore: Collection[str] = ()
) -> PretrainedTranslator:
    """Read the parts of a translator from a folder; errors are those of `Translator.from_huggingface`."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: from_huggingface reads a local one and downloads nothing; "
            "huggingface_hub.snapshot_download(name) gives one"
        )
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in _READERS:
        raise CheckpointError(
            f"{folder / 'config.json'} says model_type={kind!r}, which is no translator that is read here: "
            f"{nearest(str(kind), _READERS)}"
        )
    return _READERS[kind](folder, config, languages, ignore)
