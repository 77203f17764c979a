"""Read a translator of many languages that transformers saved: M2M100, NLLB, mBART or mBART-50."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import VocabularyError
from regard.models.transformer.multilingual_checkpoint import MultilingualSettings
from regard.translation.piece_vocabulary import LineMarks, PieceCutter, PieceVocabulary, check_fits, checked_ids
from regard.translation.pretrained_parts import (
    Languages,
    PretrainedTranslator,
    check_special_ids,
    chosen_language,
    tokenizer_settings,
)
from regard.translation.pretrained_search import PretrainedSearch
from regard.translation.sentencepiece_file import SentencePieceModel
from regard.translation.tokenizer_file import TokenizerFile

_TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"}
_CODES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr "
    "ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps "
    "pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}
"""The languages of M2M100, whose ids follow those of vocab.json in this order; no file of the model has them."""
_NLLB, _MBART = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}"), re.compile(r"[a-z]{2}_[A-Z]{2}")
_SPECIAL = "<s>", "<pad>", "</s>", "<unk>", "<mask>"


@dataclass(frozen=True)
class _Tokenizer:
    """What cuts text, the ids of pieces, those of the languages by their codes, and ids that are no text."""

    cutter: PieceCutter
    ids: dict[str, int]
    languages: dict[str, int]
    unspoken: frozenset[int]


def read_multilingual(
    folder: Path, config: dict[str, Any], languages: Languages, ignore: Collection[str]
) -> PretrainedTranslator:
    """The parts of a translator that is told both languages, by name or in tokenizer_config.json."""
    settings = MultilingualSettings.read(config, ignore)
    given = tokenizer_settings(folder, _TOKENS)
    kind = str(given.get("tokenizer_class", "")).removesuffix("Fast")
    if (folder / "vocab.json").exists() and not settings.is_mbart:
        tokenizer = _of_m2m(folder, given, settings.size)
    else:
        tokenizer = _of_file(folder, _MBART if settings.is_mbart else _NLLB, settings.size)
    known = tokenizer.languages
    source = known[chosen_language("source", languages[0] or given.get("src_lang"), known)]
    named = languages[1] or given.get("tgt_lang") or _forced(folder, config, known)
    target = known[chosen_language("target", named, known)]
    is_old_mbart = settings.is_mbart and _is_mbart_25(folder, kind)
    chosen = {"begin": target} if is_old_mbart else {"first": target}
    search = PretrainedSearch.read(folder, tokenizer.ids["<unk>"], ignore, **chosen)
    check_special_ids(folder, search, settings.size, tokenizer.ids)
    end, unspoken = search.special.end, tokenizer.unspoken | frozenset(known.values())
    behind = is_old_mbart or given.get("legacy_behaviour") is True
    source_marks = LineMarks((), (end, source)) if behind else LineMarks((source,), (end,))
    source_marks, target_marks = (
        LineMarks(marks.before, marks.after, unspoken=unspoken)
        for marks in (source_marks, LineMarks(() if is_old_mbart else (target,)))
    )
    cutter, ids = tokenizer.cutter, tokenizer.ids
    return PretrainedTranslator(
        settings.load(folder, search.max_target_length),
        PieceVocabulary(cutter, ids, search.special, source_marks, size=settings.size),
        PieceVocabulary(cutter, ids, search.special, target_marks, size=settings.size),
        search.settings,
    )


def _of_m2m(folder: Path, given: dict[str, Any], size: int) -> _Tokenizer:
    """The tokenizer of M2M100, whose languages have the ids behind those of its pieces."""
    tokenizer_settings(folder, {"sp_model_kwargs": {}})
    ids = checked_ids(folder / "vocab.json", size)
    codes = given.get("language_codes", "m2m100")
    if codes not in _CODES:
        raise VocabularyError(
            f"{folder / 'tokenizer_config.json'} says language_codes={codes!r}; {' and '.join(_CODES)} are known"
        )
    languages = {code: len(ids) + number for number, code in enumerate(_CODES[codes].split())}
    ids |= {f"__{code}__": number for code, number in languages.items()}
    check_fits(folder / "vocab.json, with its languages,", ids, size)
    cutter = SentencePieceModel.read(folder / "sentencepiece.bpe.model")
    return _Tokenizer(cutter, ids, languages, frozenset(ids[name] for name in _SPECIAL if name in ids))


def _of_file(folder: Path, code: re.Pattern[str], size: int) -> _Tokenizer:
    """The tokenizer of tokenizer.json, with its languages, the tokens that look like their codes."""
    path = folder / "tokenizer.json"
    file = TokenizerFile.read(path)
    check_fits(path, file.ids, size)
    if "<unk>" not in file.ids:
        raise VocabularyError(f"{path} has no id for '<unk>', which stands for what is unknown")
    languages = {token: number for token, number in file.ids.items() if code.fullmatch(token)}
    return _Tokenizer(
        file, file.ids, languages, file.special | {file.ids[name] for name in _SPECIAL if name in file.ids}
    )


def _forced(folder: Path, config: dict[str, Any], known: dict[str, int]) -> str | None:
    """The language that the folder forces as the first token, if it does."""
    forced = PretrainedSearch.first_token(folder, config)
    return next((code for code, number in known.items() if number == forced), None)


def _is_mbart_25(folder: Path, kind: str) -> bool:
    """Whether a model is mBART of 25 languages, which says them behind the source, or mBART-50, before it."""
    kinds = {"MBartTokenizer": True, "MBart50Tokenizer": False}
    if kind not in kinds:
        raise VocabularyError(
            f"{folder / 'tokenizer_config.json'} names no tokenizer_class, or {kind!r}; {' or '.join(kinds)} tells "
            "where the language stands: AutoTokenizer.from_pretrained(name).save_pretrained(folder) of transformers "
            "writes it"
        )
    return kinds[kind]
