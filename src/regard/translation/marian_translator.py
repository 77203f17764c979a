"""Read a Marian translator that transformers saved, or `Translator.to_huggingface`."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError, VocabularyError
from regard.models.transformer.marian_checkpoint import MarianSettings, load_marian
from regard.translation.piece_vocabulary import LineMarks, PieceVocabulary, checked_ids
from regard.translation.pretrained_export import SOURCE_VOCABULARY, TARGET_VOCABULARY
from regard.translation.pretrained_parts import (
    Languages,
    PretrainedTranslator,
    check_special_ids,
    chosen_language,
    refuse_language,
    tokenizer_settings,
)
from regard.translation.pretrained_search import PretrainedSearch
from regard.translation.sentencepiece_file import SentencePieceModel
from regard.translation.vocabulary import SpecialIds, Vocabulary

# Of tokenizer_config.json, what changes the ids that a text gets.
_NEEDED = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "sp_model_kwargs": {}}
_LANGUAGE = re.compile(r">>[^<>\s]*<<")


def read_marian(
    folder: Path, config: dict[str, Any], languages: Languages, ignore: Collection[str]
) -> PretrainedTranslator:
    """The parts of a Marian translator, with source.spm, target.spm and vocab.json."""
    settings = MarianSettings.read(config, ignore)
    refuse_language("source", languages[0])
    if (folder / SOURCE_VOCABULARY).exists():
        refuse_language("target", languages[1])
        return _exported(folder, settings, ignore)
    separate = tokenizer_settings(folder, _NEEDED).get("separate_vocabs", False)
    source_ids = checked_ids(folder / "vocab.json", settings.source_size)
    target_ids = checked_ids(folder / "target_vocab.json", settings.target_size) if separate else source_ids
    search = PretrainedSearch.read(folder, target_ids["<unk>"], ignore)
    check_special_ids(folder, search, settings.target_size, target_ids)
    source_special = search.special if not separate else _of_source(source_ids)
    source, target = (SentencePieceModel.read(folder / f"{side}.spm") for side in ("source", "target"))
    return PretrainedTranslator(
        load_marian(folder, settings, search.max_target_length),
        PieceVocabulary(source, source_ids, source_special, source_marks(source_ids, source_special, languages[1])),
        PieceVocabulary(target, target_ids, search.special, LineMarks(starts=named_languages(target_ids))),
        search.settings,
    )


def source_marks(ids: dict[str, int], special: SpecialIds, target: str | None) -> LineMarks:
    """END behind a line; the language that it is translated into before it, once for all or by each line."""
    starts = named_languages(ids)
    if target is None:
        return LineMarks((), (special.end,), starts, _LANGUAGE)
    names = {start[2:-2]: start for start in starts}
    start = names[chosen_language("target", target.removeprefix(">>").removesuffix("<<"), names)]
    return LineMarks(starts[start], (special.end,))


def named_languages(ids: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The languages that a line may begin with, as >>fra<<, by their ids."""
    return {piece: (number,) for piece, number in ids.items() if _LANGUAGE.fullmatch(piece)}


def _exported(folder: Path, settings: MarianSettings, ignore: Collection[str]) -> PretrainedTranslator:
    """What `Translator.to_huggingface` wrote, with vocabularies of its own."""
    source, target = (Vocabulary.load(folder / name) for name in (SOURCE_VOCABULARY, TARGET_VOCABULARY))
    search = PretrainedSearch.read(folder, target.special.unknown, ignore)
    if search.special != target.special or (len(source), len(target)) != (settings.source_size, settings.target_size):
        raise CheckpointError(f"the vocabularies in {folder} are not those of its model: their ids or sizes differ")
    return PretrainedTranslator(
        load_marian(folder, settings, search.max_target_length), source, target, search.settings
    )


def _of_source(ids: dict[str, int]) -> SpecialIds:
    """The special ids of a source with a vocabulary of its own, by their names."""
    missing = [name for name in ("<pad>", "</s>") if name not in ids]
    if missing:
        raise VocabularyError(f"vocab.json has no id for {', '.join(missing)}")
    return SpecialIds(ids["<pad>"], ids["<unk>"], ids["<pad>"], ids["</s>"], ())
