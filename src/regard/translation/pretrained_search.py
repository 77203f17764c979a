"""Read how a translator of transformers searches: generation_config.json, or the same settings in config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.models.language_model.huggingface.config_reader import ModelSettings
from regard.models.language_model.saved_model import read_json
from regard.models.transformer.pretrained_settings import GENERATION
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import SpecialIds

# What says nothing of the translation: where the file came from, what a call returns, and what only sampling reads.
_HARMLESS = {
    "_from_model_config",
    "output_logits",
    "prefill_chunk_size",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
# Settings of which only the value that changes nothing is read.
_WITHOUT_EFFECT = {
    "diversity_penalty": (0, 0.0),
    "do_sample": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "repetition_penalty": (1, 1.0),
    "use_mtp": (False,),
}
_IDS = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"}
UNLIMITED = 1e6
"""A `max_length_ratio` that no translation reaches: transformers limits the length itself, whatever the source has."""
UNSTATED = 2.0
"""The `max_length_ratio` of a folder that states no longest translation, where transformers would end at 20 tokens."""


@dataclass(frozen=True)
class PretrainedSearch:
    """How a model of transformers translates: settings, special ids, and the most tokens of a translation if it says.

    A model that forces its end where a translation is cut says one token less of its own.
    """

    settings: SearchSettings
    special: SpecialIds
    max_target_length: int | None

    @classmethod
    def read(
        cls,
        folder: Path,
        unknown: int,
        ignore: Collection[str] = (),
        *,
        begin: int | None = None,
        first: int | None = None,
    ) -> PretrainedSearch:
        """Read the settings of a folder, of a model with this id for what is unknown.

        begin, first: the token before a translation, and the one that each begins with, where the target language says
        so; without them the folder does.

        Raises:
            CheckpointError: a file is damaged; a setting that is missing or impossible, or changes a translation in a
                way that is not known here, and is not in `ignore`.
        """
        config = read_json(folder / "config.json")
        values, origin = _values(folder, config)
        chosen = {"decoder_start_token_id": begin, "forced_bos_token_id": first}
        values |= {name: value for name, value in chosen.items() if value is not None}
        given = ModelSettings({**values, "model_type": config.get("model_type")}, {}, origin=origin)
        special = _special(given, unknown)
        for name, allowed in _WITHOUT_EFFECT.items():
            if name not in ignore:
                given.only(name, None, *allowed)
        beam, best = (_whole(given, name, 1) for name in ("num_beams", "num_return_sequences"))
        early = None if "early_stopping" in ignore else given.only("early_stopping", None, False, True)
        penalty = given.get("length_penalty", 1.0)
        if not isinstance(penalty, int | float) or penalty < 0:
            raise CheckpointError(f"length_penalty is {penalty!r}; it needs a number of at least 0")
        longest = _longest(given)
        settings = SearchSettings(
            beam=max(beam, best),
            n_best=best,
            length_penalty=float(penalty),
            penalty_form="length",
            max_length_ratio=UNSTATED if longest is None else UNLIMITED,
            method="refilled",
            stop_early=early is True,
            forced_end=given.get("forced_eos_token_id") is not None,
            renormalize=given.only("renormalize_logits", None, True, False) is True,
        )
        given.check_all_read(_HARMLESS | set(ignore))
        return cls(settings, special, longest)

    @staticmethod
    def first_token(folder: Path, config: Mapping[str, Any]) -> object:
        """The id that a folder forces as the first of a translation; None if it forces none."""
        return _values(folder, config)[0].get("forced_bos_token_id")


def _values(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What a folder says of its search, and the name of the file that does."""
    path = folder / "generation_config.json"
    # transformers reads config.json only where there is no generation_config.json.
    names = _IDS if path.exists() else GENERATION | _IDS
    values = {name: value for name, value in config.items() if name in names}
    own = read_json(path) if path.exists() else {}
    return values | {name: value for name, value in own.items() if value is not None}, (
        path.name if path.exists() else "config.json"
    )


def _special(given: ModelSettings, unknown: int) -> SpecialIds:
    pad, begin, end = (_id(given, name) for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"))
    forced = given.get("forced_eos_token_id")
    if forced is not None and forced != end:
        raise CheckpointError(f"forced_eos_token_id is {forced!r}, and eos_token_id {end}: they need to be equal")
    first = None if given.get("forced_bos_token_id") is None else _id(given, "forced_bos_token_id")
    banned = given.get("bad_words_ids") or []
    if not all(isinstance(word, list) and len(word) == 1 and type(word[0]) is int for word in banned):
        raise CheckpointError(f"bad_words_ids is {banned!r}; words of one id each are read here, as [[{pad}]]")
    return SpecialIds(pad, unknown, begin, end, tuple(sorted({word[0] for word in banned} - {end})), first)


def _longest(given: ModelSettings) -> int | None:
    """The most tokens of a translation that the model may say itself, its END included where it is not forced."""
    new, whole = (_whole(given, name, None) for name in ("max_new_tokens", "max_length"))
    most = new if new is not None else None if whole is None else whole - 1
    if most is None:
        return None
    return max(most - (given.get("forced_eos_token_id") is not None), 1)


def _id(given: ModelSettings, name: str) -> int:
    value = given.need(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{name} is {value!r}; it needs to be one id")
    return value


def _whole(given: ModelSettings, name: str, default: Any) -> Any:
    value = given.get(name, default)
    value = default if value is None else value
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"{name} is {value!r}; it needs to be a whole number of at least 1")
    return value


def with_choices(settings: SearchSettings, choices: Mapping[str, Any]) -> SearchSettings:
    """The settings with some of them replaced, and a beam that holds as many translations as are asked for."""
    values = {**settings.model_dump(), **choices}
    return SearchSettings(**{**values, "beam": max(values["beam"], values["n_best"])})
