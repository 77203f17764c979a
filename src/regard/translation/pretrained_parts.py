"""What a translator of transformers consists of, and how its files say which languages it translates."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError, ConfigurationError, VocabularyError
from regard.models import Transformer
from regard.models.language_model.saved_model import read_json
from regard.translation.pretrained_search import PretrainedSearch
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import LineVocabulary

Languages = tuple[str | None, str | None]
"""The codes of the source's language and of the target's; None: what the folder says, or has no need of."""
UNCHOSEN: Languages = (None, None)
_SHOWN = 6


@dataclass(frozen=True)
class PretrainedTranslator:
    """The parts of a translator of transformers."""

    model: Transformer
    source_vocabulary: LineVocabulary
    target_vocabulary: LineVocabulary
    search: SearchSettings


def tokenizer_settings(folder: Path, needed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of tokenizer_config.json, none where there is no such file.

    Raises:
        VocabularyError: one of those that are needed has another value.
    """
    path = folder / "tokenizer_config.json"
    given = read_json(path) if path.exists() else {}
    for name, value in needed.items():
        found = given.get(name, value)
        if isinstance(found, dict) and "content" in found:  # a token with its flags
            found = found["content"]
        if found != value and found is not None:
            raise VocabularyError(f"{path} says {name}={found!r}; only {value!r} is read here")
    return given


def chosen_language(side: str, named: object, known: Collection[str]) -> str:
    """The language of a side, checked.

    Raises:
        ConfigurationError: none is named, or one that the model does not have.
    """
    if named is None:
        raise ConfigurationError(
            f"the {side} language is not named, and this model has {len(known)}: name both as "
            f'languages=("SOURCE", "TARGET"), on the command line --languages SOURCE:TARGET; {_listed(sorted(known))}'
        )
    if named not in known:
        near = _nearest(str(named), sorted(known))
        hint = f"did you mean {', '.join(map(repr, near))}? It has {len(known)}" if near else _listed(sorted(known))
        raise ConfigurationError(f"there is no language {named!r} in this model: {hint}")
    return str(named)


def _nearest(named: str, codes: list[str]) -> list[str]:
    """At most three codes: that which differs in case alone, those that go on, the start of a language's name, others.

    >>> _nearest("EN", ["de", "en", "nl"]), _nearest("english", ["de", "en"]), _nearest("fra", ["deu_Latn", "fra_Latn"])
    (['en'], ['en'], ['fra_Latn'])
    """
    folded = {code: code.casefold() for code in codes}
    asked = named.casefold()
    alike = [code for code in codes if folded[code] == asked]
    alike = alike or [code for code in codes if folded[code].startswith(asked)]
    alike = alike or [code for code in codes if asked.startswith(folded[code])]
    return (alike or difflib.get_close_matches(named, codes, n=3, cutoff=0.4))[:3]


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    some = ", ".join(map(repr, names[:_SHOWN]))
    return f"it has {some}" + (f" and {more} more" if more > 0 else "") if names else "its tokenizer has none"


def refuse_language(side: str, named: str | None) -> None:
    """Refuse a language that the model is not told.

    Raises:
        ConfigurationError: one is named.
    """
    if named is not None:
        raise ConfigurationError(f"this model is told no {side} language, and {named!r} is named: leave it out")


def check_special_ids(folder: Path, search: PretrainedSearch, size: int, ids: Mapping[str, int]) -> None:
    """Check the special ids of the settings against the size of the model and its vocabulary.

    Raises:
        CheckpointError: one is beyond the table, or END is another one.
    """
    special = search.special
    for name, number in (("pad", special.pad), ("begin", special.begin), ("end", special.end)):
        if number >= size:
            raise CheckpointError(
                f"the configuration in {folder} has the id {number} for {name}, and the model has ids up to {size - 1}"
            )
    if ids.get("</s>", special.end) != special.end:
        raise CheckpointError(
            f"eos_token_id in {folder} is {special.end}, and '</s>' in its vocabulary {ids['</s>']}: they need to be "
            "equal"
        )
