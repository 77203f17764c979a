"""Record the attention of a Hugging Face model from a local folder while it reads a text."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigurationError, CorpusError, require
from .atlas import Atlas
from .atlas.tokenized_text import TokenizedText
from .effect_models import TextEffects
from .record_translation import atlas_of_translation as atlas_of_translation
from .recording import Recording, record

MOST_GENERATED = 256
"""The most tokens that an encoder-decoder model, such as T5, generates."""


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file, stripped of surrounding white space.

    Raises:
        CorpusError: it cannot be read, is empty, or is not UTF-8.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(
            f"the text {str(path)!r} cannot be read: {error.strerror or error}; it needs to be a file of text"
        ) from None
    return decoded_text(data, f"the text {path}", str(path))


def decoded_text(data: bytes, name: str, place: str = "") -> str:
    r"""Decode a UTF-8 text, stripped of surrounding white space; messages call it by its name, and say the place.

    Raises:
        CorpusError: it is empty, or is not UTF-8.

    >>> decoded_text(b" It is late.\n", "standard input")
    'It is late.'
    """
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{place or name}: byte 0x{error.object[error.start]:02x} at position {error.start + 1} is not UTF-8 "
            f"({error.reason}); convert the text to UTF-8, for instance with iconv"
        ) from None
    if not text:
        raise CorpusError(f"{name} is empty; it needs at least one word for a model to read")
    return text


def atlas_of_text(folder: str | Path, text: str, *, title: str = "") -> Atlas:
    """Record the attention of a Hugging Face model that reads a text as one sequence.

    The model and its tokenizer come from a folder, as `save_pretrained` leaves it; nothing is fetched, no code of the
    folder runs, and weights are read from safetensors alone. A model with encoder and decoder reads the text and writes
    its own answer, greedily.

    Raises:
        AtlasError: the model has no attention that could be caught.
        CheckpointError: there is no such model, or transformers cannot read it.
        CorpusError: the text has more tokens than the model takes, or none.
        MissingExtra: transformers is not installed.
    """
    reader = TextReader(folder)
    return _read(reader.model, reader.tokenizer, text, title or reader.title(text))


class TextReader:
    """`atlas_of_text` as a function of the text, for a model that is loaded once, now.

    model: what is recorded. with_head: the same with its output layer, of a language model.

    Raises:
        CheckpointError: there is no such model, or transformers cannot read it.
        MissingExtra: transformers is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._name = Path(folder).name
        whole, self.tokenizer = _loaded(Path(folder))
        is_language_model = _predicts_tokens(whole.config)
        self.model: Any = whole.base_model if is_language_model else whole
        self.with_head: Any = whole if is_language_model else None

    def __call__(self, text: str) -> Atlas:
        return _read(self.model, self.tokenizer, text, self.title(text))

    def title(self, text: str) -> str:
        """What the atlas of a text is called."""
        return f"{text[:80]} · {self._name}"

    @property
    def effects(self) -> TextEffects | None:
        """The model for requests of effects; None of one that reads a text and writes another."""
        if self.model.config.is_encoder_decoder:
            return None
        return TextEffects(self.model, self.tokenizer, self.with_head)

    def windows(self, text: str, size: int) -> list[str]:
        """The text in consecutive parts of at most `size` tokens, [CLS] and its like included, cut between words.

        A word of more tokens than that is cut inside.

        Raises:
            ConfigurationError: the tokenizer does not say where its tokens are in a text; no token has room.
        """
        room = size - self.tokenizer.num_special_tokens_to_add()
        if room < 1:
            raise ConfigurationError(
                f"a window of {size} tokens has no room beside {size - room} special ones: give at least "
                f"{size - room + 1}"
            )
        if not self.tokenizer.is_fast:
            raise ConfigurationError(
                "the model's tokenizer does not say where its tokens are in a text, so that this cannot be cut: it "
                "needs a tokenizer.json in its folder; cut the text yourself"
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        words, places = encoded.word_ids(), encoded["offset_mapping"]
        parts: list[str] = []
        start = 0
        while start < len(words):
            stop = _word_end(words, start, min(start + room, len(words)))
            parts.append(text[places[start][0] : places[stop - 1][1]].strip())
            start = stop
        return [part for part in parts if part]


def _word_end(words: list[int | None], start: int, stop: int) -> int:
    """The last end of a word at or before `stop`, or `stop` itself where one word fills it all."""
    end = stop
    while end < len(words) and end > start and words[end] is not None and words[end] == words[end - 1]:
        end -= 1
    return end if end > start else stop


def _predicts_tokens(config: Any) -> bool:
    """Whether a folder has a language model with its output layer."""
    architectures = getattr(config, "architectures", None) or ()
    predicts = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    return predicts and not config.is_encoder_decoder


def _read(model: Any, tokenizer: Any, text: str, title: str) -> Atlas:
    encoded = tokenizer(text, return_tensors="pt", verbose=False)
    ids = encoded["input_ids"][0].tolist()
    most = _most_positions(model)
    _check_length(len(ids), most)
    words = TokenizedText(_words(tokenizer, ids), encoded.word_ids() if tokenizer.is_fast else None)
    read = {name: encoded[name] for name in encoded if name in signature(model.forward).parameters}
    try:
        with torch.no_grad(), record(model) as recording:
            if model.config.is_encoder_decoder:
                longest = MOST_GENERATED if most is None else min(MOST_GENERATED, most)
                answer = model.generate(**read, num_beams=1, do_sample=False, max_new_tokens=longest)[0]
                said = _words(tokenizer, answer.tolist())
            else:
                model(**read)
                said = []
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{type(model).__name__} cannot read the text: {_line(error)}") from error
    tokens = _by_module(recording, said[:-1], said[1:], words) if said and recording.calls else words
    return recording.atlas(tokens=tokens, title=title)


def _by_module(recording: Recording, read: list[str], said: list[str], source: TokenizedText) -> dict[str, Any]:
    """Tokens for each module of an encoder-decoder model."""
    tokens: dict[str, Any] = {}
    for call in recording.calls:
        if call.kind == "cross":
            tokens[call.name] = said, source
        else:
            tokens[call.name] = source if "encoder" in call.name.split(".") else read
    return tokens


def _loaded(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder, with `attn_implementation="regard"`."""
    require("transformers", extra="huggingface")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"there is no model in {folder}: it needs to be a folder with a config.json, as `save_pretrained` of "
            "transformers leaves it; nothing is fetched by name"
        )
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from ..huggingface import swap

    told = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # parts that the attention does not need may be missing, or left over
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = AutoModelForCausalLM if _predicts_tokens(config) else AutoModel
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else kind
        model = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, use_safetensors=True)
        swap(model.eval())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load the model in {folder}: {_line(error)}") from error
    finally:
        logging.set_verbosity(told)
        if bars:
            logging.enable_progress_bar()
    return model, tokenizer


def _words(tokenizer: Any, ids: list[int]) -> list[str]:
    return ["" if token is None else str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


def _most_positions(model: Any) -> int | None:
    """The most tokens that a model takes or says; None: any number, as of encoders and decoders without a table."""
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    if not model.config.is_encoder_decoder:
        return most
    tables = (module for name, module in model.named_modules() if name.endswith("embed_positions"))
    return most if any(isinstance(table, torch.nn.Embedding) for table in tables) else None


def _check_length(length: int, most: int | None) -> None:
    if length == 0:
        raise CorpusError("the text has no token that the model's tokenizer knows; give it other words")
    if most is not None and length > most:
        raise CorpusError(
            f"the text has {length:,} tokens, and the model takes {most:,}; give it a shorter one, or read a part "
            f"of it: --first {most} or --window {most} of regard explore"
        )


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
