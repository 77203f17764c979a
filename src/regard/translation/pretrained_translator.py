"""Read a translator that transformers saved: its model, the vocabularies of both sides, and how it searches."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from regard.errors import CheckpointError, VocabularyError
from regard.models import Transformer
from regard.models.language_model.saved_model import read_json
from regard.models.transformer.marian_checkpoint import MarianSettings, load_marian
from regard.translation.marian_vocabulary import MarianVocabulary, read_marian_ids
from regard.translation.pretrained_export import SOURCE_VOCABULARY, TARGET_VOCABULARY
from regard.translation.pretrained_search import PretrainedSearch
from regard.translation.sentencepiece_file import SentencePieceModel
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import LineVocabulary, SpecialIds, Vocabulary

# Of tokenizer_config.json, what changes the ids that a text gets.
_TOKENIZER_SETTINGS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "sp_model_kwargs": {}}


@dataclass(frozen=True)
class PretrainedTranslator:
    """The parts of a translator of transformers."""

    model: Transformer
    source_vocabulary: LineVocabulary
    target_vocabulary: LineVocabulary
    search: SearchSettings


def is_pretrained(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is one that transformers saved, and not that of a run."""
    folder = Path(folder)
    return (folder / "config.json").is_file() and not (folder / "experiment.yaml").exists()


def read_pretrained(folder: Path, ignore: Collection[str] = ()) -> PretrainedTranslator:
    """Read the parts of a translator from a folder; errors are those of `Translator.from_huggingface`."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: from_huggingface reads a local one and downloads nothing; "
            "huggingface_hub.snapshot_download(name) gives one"
        )
    config = read_json(folder / "config.json")
    if (kind := config.get("model_type")) != "marian":
        raise CheckpointError(
            f"{folder / 'config.json'} says model_type={kind!r}; translators of the type 'marian' are read here, as "
            "those of OPUS-MT"
        )
    settings = MarianSettings.read(config, ignore)
    if (folder / SOURCE_VOCABULARY).exists():
        return _exported(folder, settings, ignore)
    tokenizer = _tokenizer_settings(folder)
    separate = tokenizer.get("separate_vocabs", False)
    source_ids = read_marian_ids(folder / "vocab.json", settings.source_size)
    target_ids = read_marian_ids(folder / "target_vocab.json", settings.target_size) if separate else source_ids
    search = PretrainedSearch.read(folder, target_ids["<unk>"], ignore)
    _check_ids(folder, search, settings, target_ids)
    source_special = search.special if not separate else _of_source(source_ids)
    source, target = (SentencePieceModel.read(folder / f"{side}.spm") for side in ("source", "target"))
    return PretrainedTranslator(
        load_marian(folder, settings, search.max_target_length),
        MarianVocabulary(source, source_ids, source_special, after=(source_special.end,)),
        MarianVocabulary(target, target_ids, search.special),
        search.settings,
    )


def _exported(folder: Path, settings: MarianSettings, ignore: Collection[str]) -> PretrainedTranslator:
    """What `Translator.to_huggingface` wrote, with vocabularies of its own."""
    source, target = (Vocabulary.load(folder / name) for name in (SOURCE_VOCABULARY, TARGET_VOCABULARY))
    search = PretrainedSearch.read(folder, target.special.unknown, ignore)
    if search.special != target.special or (len(source), len(target)) != (settings.source_size, settings.target_size):
        raise CheckpointError(f"the vocabularies in {folder} are not those of its model: their ids or sizes differ")
    return PretrainedTranslator(
        load_marian(folder, settings, search.max_target_length), source, target, search.settings
    )


def _tokenizer_settings(folder: Path) -> dict:
    path = folder / "tokenizer_config.json"
    given = read_json(path) if path.exists() else {}
    for name, needed in _TOKENIZER_SETTINGS.items():
        value = given.get(name, needed)
        if isinstance(value, dict) and "content" in value:  # a token with its flags
            value = value["content"]
        if value != needed and value is not None:
            raise VocabularyError(f"{path} says {name}={value!r}; only {needed!r} is read here")
    return given


def _check_ids(folder: Path, search: PretrainedSearch, settings: MarianSettings, ids: dict[str, int]) -> None:
    special = search.special
    for name, number in (("pad", special.pad), ("begin", special.begin), ("end", special.end)):
        if number >= settings.target_size:
            raise CheckpointError(
                f"the configuration in {folder} has the id {number} for {name}, and the model has ids up to "
                f"{settings.target_size - 1}"
            )
    if ids.get("</s>", special.end) != special.end:
        raise CheckpointError(
            f"eos_token_id in {folder} is {special.end}, and '</s>' in its vocabulary {ids['</s>']}: they need to be "
            "equal"
        )


def _of_source(ids: dict[str, int]) -> SpecialIds:
    """The special ids of a source with a vocabulary of its own, by their names."""
    missing = [name for name in ("<pad>", "</s>") if name not in ids]
    if missing:
        raise VocabularyError(f"vocab.json has no id for {', '.join(missing)}")
    return SpecialIds(ids["<pad>"], ids["<unk>"], ids["<pad>"], ids["</s>"], ())
