"""Read a translator that Marian itself saved: its settings, and the model and vocabularies that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from regard.errors import CheckpointError, VocabularyError
from regard.models.transformer.marian_file import MarianFile
from regard.models.transformer.short_list import ShortList
from regard.translation import yaml12
from regard.translation.marian_translator import named_languages, source_marks
from regard.translation.piece_vocabulary import LineMarks, PieceVocabulary
from regard.translation.pretrained_parts import Languages, PretrainedTranslator, refuse_language
from regard.translation.sentencepiece_file import SentencePieceModel
from regard.translation.settings import SearchSettings
from regard.translation.short_list_file import ListedVocabularies, read_short_list
from regard.translation.vocabulary import SpecialIds

CONFIGS = "decoder.yml", "config.intgemm8bitalpha.yml", "config.intgemm8bit.yml"
"""Where the settings of decoding may stand: as Marian writes them in training, and as Bergamot's models have them."""
END, UNKNOWN = "</s>", "<unk>"
_BEAM, _LONGEST = 12, 3.0
"""Marian's own, where the settings say nothing."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "word-penalty": (0,),
    "allow-unk": (False,),
    "n-best": (False,),
    "right-left": (False,),
    "force-decode": (False,),
    "weights": ([], [1]),
    "output-sampling": ([],),
}


def is_native_marian(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has settings of Marian, and is neither a run nor one of transformers."""
    folder = Path(folder)
    others = ("experiment.yaml", "config.json")
    return _config(folder).is_file() and not any((folder / name).exists() for name in others)


def read_native_marian(folder: Path, languages: Languages) -> PretrainedTranslator:
    """Read the parts of the translator; errors are those of `Translator.from_marian`."""
    refuse_language("source", languages[0])
    config = _config(folder)
    settings = _yaml(config)
    for name, allowed in _WITHOUT_EFFECT.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise CheckpointError(
                f"{config} says {name}: {settings[name]!r}, which changes a translation and is not read here"
            )
    [weights], vocabularies = _files(config, settings, "models", 1), _files(config, settings, "vocabs", 2)
    if weights.suffix not in (".npz", ".bin"):
        raise CheckpointError(f"{weights} is neither an .npz nor a .bin, as Marian writes its models")
    file = MarianFile.read(weights)
    model = file.load(_parsed(weights, file.settings_text))
    source, target = (
        _vocabulary(path, folder / f"{side}.spm") for path, side in zip(vocabularies, ("source", "target"), strict=True)
    )
    tables = (model.source_embedding.tokens.num_embeddings, model.target_embedding.tokens.num_embeddings)
    for path, (_, ids), rows in zip(vocabularies, (source, target), tables, strict=True):
        if max(ids.values()) >= rows - 1:
            raise VocabularyError(f"{path} has ids up to {max(ids.values()):,}, and the model {rows - 1:,} of them")
    special = [_special(ids, rows - 1) for (_, ids), rows in zip((source, target), tables, strict=True)]
    model.short_list = _short_list(
        config,
        settings,
        ListedVocabularies(source[1], target[1], special[1].end, UNKNOWN, is_one=len({*vocabularies}) == 1),
    )
    marks = source_marks(source[1], special[0], languages[1])
    return PretrainedTranslator(
        model,
        PieceVocabulary(source[0], source[1], special[0], marks, size=tables[0]),
        PieceVocabulary(target[0], target[1], special[1], LineMarks(starts=named_languages(target[1])), size=tables[1]),
        SearchSettings(
            beam=_number(config, settings, "beam-size", _BEAM),
            length_penalty=float(_number(config, settings, "normalize", 0)),
            penalty_form="length",
            max_length_ratio=_number(config, settings, "max-length-factor", _LONGEST),
        ),
    )


def _config(folder: Path) -> Path:
    """The file of settings in a folder, or where the first of them would be."""
    return next((folder / name for name in CONFIGS if (folder / name).is_file()), folder / CONFIGS[0])


def _special(ids: Mapping[str, int], padding: int) -> SpecialIds:
    """The id behind all others is of what stands before a translation, a row of zeros, and of padding."""
    return SpecialIds(padding, ids[UNKNOWN], padding, ids[END], (ids[UNKNOWN], padding))


def _vocabulary(path: Path, pieces: Path) -> tuple[SentencePieceModel, dict[str, int]]:
    """What cuts text, and the ids of its pieces."""
    if path.suffix == ".spm":
        cutter = SentencePieceModel.read(path)
        ids: dict[str, Any] = {name: number for number, name in enumerate(cutter.names)}
    else:
        cutter, ids = SentencePieceModel.read(pieces), _yaml(path)
    if not all(type(number) is int and number >= 0 for number in ids.values()):
        raise VocabularyError(f"{path} is no vocabulary of Marian: it needs one whole number for each piece")
    missing = [name for name in (END, UNKNOWN) if name not in ids]
    if missing:
        raise VocabularyError(f"{path} has no id for {missing[0]!r}")
    return cutter, ids


def _files(config: Path, settings: Mapping[str, Any], name: str, count: int) -> list[Path]:
    named = settings.get(name)
    if not isinstance(named, list) or len(named) != count or not all(isinstance(one, str) for one in named):
        raise CheckpointError(f"{config} says {name}: {named!r}; it needs a list of {count} file{'s' * (count > 1)}")
    return [config.parent / one for one in named]


def _short_list(config: Path, settings: Mapping[str, Any], vocabularies: ListedVocabularies) -> ShortList | None:
    """The short list that the settings name; None for none."""
    named = settings.get("shortlist") or []
    if not named:
        return None
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise CheckpointError(f"{config} says shortlist: {named!r}; it needs a list that begins with a file")
    return read_short_list(config.parent / named[0], named[1:], vocabularies)


def _number(config: Path, settings: Mapping[str, Any], name: str, default: float) -> Any:
    value = settings.get(name, default)
    value = 1 if value is True else 0 if value is False else value
    if not isinstance(value, int | float) or value < 0:
        raise CheckpointError(f"{config} says {name}: {value!r}; it needs a number of at least 0")
    return value


def _yaml(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CheckpointError(f"cannot read {path}: {reason}") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        found = yaml12.parse(text)
    except yaml.YAMLError as error:
        raise CheckpointError(f"{path}: its settings are not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: its settings are {type(found).__name__}, and need to be a mapping of names")
    return found
