"""The model of a folder, whatever kind it is: a language model with its text, or a translator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, ConfigurationError
from ..models.language_model import LanguageModel
from ..models.language_model.saved_model import read_json
from ..translation.pretrained_parts import UNCHOSEN
from ..translation.pretrained_translator import is_pretrained, is_translator
from ..translation.translator import Translator
from .text_codec import BYTES, ByteCodec, TextCodec, TokenizerCodec

MULTILINGUAL = ("m2m_100", "mbart")
"""Translators of transformers that translate from and into many languages, by the codes that they are given."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model with the name that requests call it by: a language model with its codec, or a translator.

    languages: codes of what a translator translates from and to; one of many languages has to know them.
    """

    name: str
    language_model: LanguageModel | None = None
    codec: TextCodec | None = None
    translator: Translator | None = None
    languages: tuple[str, str] = ("en", "fr")

    @classmethod
    def load(
        cls, folder: str | Path, *, name: str | None = None, languages: tuple[str, str] = ("en", "fr")
    ) -> ServedModel:
        """Load a model that `regard train` or transformers saved, or `LanguageModel.save`.

        Raises:
            CheckpointError: there is none in the folder, or a file of it is missing or damaged.
            ConfigurationError: a language model of ours whose tokens are no bytes.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {folder}: serve needs one with a model in it")
        name = folder.resolve().name if name is None else name
        if is_pretrained(folder):
            if is_translator(folder):
                chosen = languages if _model_type(folder) in MULTILINGUAL else UNCHOSEN
                return cls(name, translator=Translator.load(folder, languages=chosen), languages=languages)
            if _model_type(folder) is not None:
                return cls(name, LanguageModel.from_huggingface(folder), TokenizerCodec(folder))
        own = folder / "model" if (folder / "model").is_dir() else folder
        if (own / "config.json").is_file():
            model = LanguageModel.load(own)
            if (own / "tokenizer.json").is_file():
                return cls(name, model, TokenizerCodec(own))
            if model.config.vocabulary_size < BYTES:
                raise ConfigurationError(
                    f"the model in {own} has {model.config.vocabulary_size} tokens, which are no bytes, and no "
                    "tokenizer.json: the text of its tokens is not known"
                )
            return cls(name, model, ByteCodec())
        return cls(name, translator=Translator.load(folder), languages=languages)


def _model_type(folder: Path) -> str | None:
    """The kind of model that transformers says is in a folder; None of a model of ours."""
    kind = read_json(folder / "config.json").get("model_type")
    return kind if isinstance(kind, str) else None
