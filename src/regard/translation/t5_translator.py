"""Read a translator of the kind of T5 that transformers saved: T5, mT5 or MADLAD."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from regard.errors import VocabularyError
from regard.models.transformer.t5_checkpoint import T5Settings
from regard.translation.piece_vocabulary import LineMarks, PieceVocabulary, check_fits
from regard.translation.pretrained_parts import (
    Languages,
    PretrainedTranslator,
    check_special_ids,
    chosen_language,
    refuse_language,
    tokenizer_settings,
)
from regard.translation.pretrained_search import PretrainedSearch
from regard.translation.tokenizer_file import TokenizerFile

_TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
_LANGUAGE = re.compile(r"<2[^<>\s]*>")
_SENTINEL = re.compile(r"<extra_id_\d+>")


def read_t5(
    folder: Path, config: dict[str, Any], languages: Languages, ignore: Collection[str]
) -> PretrainedTranslator:
    """The parts of a translator with tokenizer.json; MADLAD is told the target language, as <2fr> before a line."""
    settings = T5Settings.read(config, ignore)
    refuse_language("source", languages[0])
    tokenizer_settings(folder, _TOKENS)
    path = folder / "tokenizer.json"
    file = TokenizerFile.read(path)
    check_fits(path, file.ids, settings.size)
    if "<unk>" not in file.ids:
        raise VocabularyError(f"{path} has no id for '<unk>', which stands for what is unknown")
    search = PretrainedSearch.read(folder, file.ids["<unk>"], ignore)
    check_special_ids(folder, search, settings.size, file.ids)
    sentinels = {number for token, number in file.ids.items() if _SENTINEL.fullmatch(token)}
    unspoken = file.special | sentinels
    starts = {token: file.marked(token) for token in file.ids if _LANGUAGE.fullmatch(token)}
    end = (search.special.end,)
    if languages[1] is None:
        marks = LineMarks((), end, starts, _LANGUAGE, unspoken)
    else:
        names = {start[2:-1]: ids for start, ids in starts.items()}
        marks = LineMarks(names[chosen_language("target", languages[1], names)], end, unspoken=unspoken)
    target = LineMarks(starts=starts, unspoken=unspoken)
    return PretrainedTranslator(
        settings.load(folder, search.max_target_length),
        PieceVocabulary(file, file.ids, search.special, marks, size=settings.size),
        PieceVocabulary(file, file.ids, search.special, target, size=settings.size),
        search.settings,
    )
