"""Models by name: folders and classes of transformers, and classes of Python files, with a random batch for each."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard_doctor.python_source import UnreadableSource, decoded, parsed, read_bytes

from ..errors import ConfigurationError, require

MOST_NAMES = 8
"""Names of a file that a message lists, the last ones: a model stands behind its parts."""


def load_model(name: str) -> nn.Module:
    """A model by its name: FILE.py:NAME, a folder of transformers, or a class of transformers, in a tiny configuration.

    Raises:
        ConfigurationError: there is no such file, name or class, or what it returns is no torch module.
        MissingExtra: transformers is not installed.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), attribute)
    if Path(name).is_dir():
        transformers = require("transformers", extra="huggingface")
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(name, local_files_only=True)
        except Exception as error:
            raise ConfigurationError(f"transformers cannot load {name}: {error}") from error
    if not name.isidentifier():
        raise ConfigurationError(
            f"{name!r} is neither a folder, nor a class of transformers, nor FILE.py:NAME{_names_in(name)}"
        )
    from .tiny_models import tiny_model

    return tiny_model(name)


def _names_in(name: str) -> str:
    """The classes and functions of a Python file, for the end of a message about a file without a name."""
    path = Path(name)
    if path.suffix != ".py":
        return ""
    if not path.is_file():
        return "; and there is no such file"
    try:
        tree = parsed(decoded(read_bytes(path)))
    except UnreadableSource as error:
        return f"; and {path} {error}"
    names = [one.name for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef)]
    return f"; of {path} name one of {', '.join(f'{path}:{one}' for one in names[-MOST_NAMES:])}" if names else ""


def _from_file(path: Path, attribute: str) -> nn.Module:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    module = ModuleType(f"examined_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look for the module of their class
    try:
        exec(compile(path.read_text("utf-8"), str(path), "exec"), module.__dict__)
        made = getattr(module, attribute)
        model = made if isinstance(made, nn.Module) else made()
    except AttributeError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigurationError(
            f"{path}:{attribute} cannot be made: {type(error).__name__}: {error}; NAME is a module, or a class or "
            "function called without arguments: write a function that returns the model, and name that"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{path}:{attribute} returns {type(model).__name__}, not a torch.nn.Module")
    return model


def random_batch(
    model: nn.Module, rows: int = 2, tokens: int = 72, vocabulary: int | None = None, dim: int | None = None
) -> Any:
    """Random token ids, or embeddings of `dim`; with a source and a target for encoder-decoders of transformers."""
    if rows < 1 or tokens < 2:
        raise ConfigurationError(f"a batch needs a row and two tokens, not {rows} of {tokens}")
    generator = torch.Generator().manual_seed(0)
    if dim is not None:
        return torch.randn(rows, tokens, dim, generator=generator)
    config = getattr(model, "config", None)
    if vocabulary is None and config is not None and hasattr(config, "get_text_config"):
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is None:
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not sizes:
            raise ConfigurationError("the model has no embedding: pass the dim of its inputs, or its vocabulary")
        vocabulary = min(sizes)

    def ids(length: int) -> Tensor:
        low = min(10, vocabulary - 1)  # behind the special tokens
        return torch.randint(low, vocabulary, (rows, length), generator=generator)

    if config is None or not hasattr(model, "set_attn_implementation"):
        return ids(tokens)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids(tokens // 2), "decoder_input_ids": ids(tokens)}
    return {"input_ids": ids(tokens)}
