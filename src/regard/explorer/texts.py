"""Atlases of a text that a model reads: a model of transformers from a local folder, or one of our translators."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError, CorpusError, require
from .atlas import Atlas
from .recording import Recording, record

if TYPE_CHECKING:
    from ..translation.translator import Translator

MOST_GENERATED = 256
"""Tokens that a model which writes a text of its own, such as T5, is let write."""


def read_text(path: str | Path) -> str:
    """The text of a file, without the white space around it.

    Raises:
        CorpusError: it cannot be read, is empty, or is not UTF-8.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig").strip()
    except OSError as error:
        raise CorpusError(f"the text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}: byte 0x{error.object[error.start]:02x} at position {error.start + 1} is not UTF-8 "
            f"({error.reason}); convert the text to UTF-8, for instance with iconv"
        ) from None
    if not text:
        raise CorpusError(f"the text {path} is empty; it needs at least one word for a model to read")
    return text


def atlas_of_text(folder: str | Path, text: str, *, title: str = "") -> Atlas:
    """What a model of transformers attends to while it reads a text as one sequence.

    The model and its tokenizer come from a folder, as `save_pretrained` leaves it; nothing is fetched, no code of the
    folder runs, and weights are read from safetensors alone. A model with encoder and decoder reads the text and writes
    its own answer, greedily.

    Raises:
        AtlasError: the model has no attention that could be caught.
        CheckpointError: there is no such model, or transformers cannot read it.
        CorpusError: the text has more tokens than the model takes, or none.
        MissingExtra: transformers is not installed.
    """
    folder = Path(folder)
    model, tokenizer = _loaded(folder)
    encoded = tokenizer(text, return_tensors="pt", verbose=False)
    ids = encoded["input_ids"][0].tolist()
    _check_length(len(ids), model)
    words = _words(tokenizer, ids)
    read = {name: encoded[name] for name in encoded if name in signature(model.forward).parameters}
    try:
        with torch.no_grad(), record(model) as recording:
            if model.config.is_encoder_decoder:
                answer = model.generate(**read, num_beams=1, do_sample=False, max_new_tokens=MOST_GENERATED)[0]
                said = _words(tokenizer, answer.tolist())
            else:
                model(**read)
                said = []
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"the model in {folder} cannot read the text: {_line(error)}") from error
    tokens = _by_module(recording, said[:-1], said[1:], words) if said and recording.calls else words
    return recording.atlas(tokens=tokens, title=title or f"{text[:80]} · {folder.name}")


def atlas_of_translation(translator: Translator, sentence: str, *, title: str = "") -> Atlas:
    """What a translator attends to while it says its own best translation of a sentence.

    Rows of cross-attention are named by the tokens that are said there, END the last; rows of the decoder's
    self-attention by the tokens that it was given, BEGIN the first.

    Raises:
        CorpusError: the sentence is empty, or has more tokens than the model takes.
    """
    from ..translation.search import beam_search
    from ..translation.vocabulary import BEGIN, END

    found = translator.translate([sentence], observe=False)[0]
    if not found.candidates:
        raise CorpusError("the sentence is empty; it needs at least one word to translate")
    model: Any = translator.model
    source = torch.tensor([translator.source_vocabulary.encode(sentence)])
    source = source.to(next(model.parameters()).device)
    lengths = torch.tensor([source.shape[1]], device=source.device)
    best = beam_search(model, source, lengths, translator.search, observe=False)[0][0]
    said = [*best.ids, END] if best.finished else list(best.ids)
    read = [BEGIN, *said[:-1]]
    with torch.no_grad(), record(model) as recording:
        model(source, lengths, torch.tensor([read], device=source.device))
    spelled = translator.target_vocabulary.tokens
    tokens = _by_module(recording, spelled(read), spelled(said), list(found.source_tokens))
    return recording.atlas(tokens=tokens, title=title or f"{found.source} → {found.text}")


def _by_module(recording: Recording, read: list[str], said: list[str], source: list[str]) -> dict[str, Any]:
    """The words of each module of a model with encoder and decoder."""
    tokens: dict[str, Any] = {}
    for call in recording.calls:
        if call.kind == "cross":
            tokens[call.name] = said, source
        else:
            tokens[call.name] = source if "encoder" in call.name.split(".") else read
    return tokens


def _loaded(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, the model with "regard" for its attention."""
    require("transformers", extra="huggingface")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"there is no model in {folder}: it needs to be a folder with a config.json, as `save_pretrained` of "
            "transformers leaves it; nothing is fetched by name"
        )
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from ..huggingface import swap

    told = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # parts that the attention does not need may be missing, or left over
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModel
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


def _check_length(length: int, model: Any) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if length == 0:
        raise CorpusError("the text has no token that the model's tokenizer knows; give it other words")
    if isinstance(most, int) and not model.config.is_encoder_decoder and length > most:
        raise CorpusError(f"the text has {length:,} tokens, and the model takes {most:,}; give it a shorter one")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
