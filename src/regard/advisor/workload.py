"""The attention that a user has to compute: task, lengths, heads, dtype, device and memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, DeviceError, nearest
from ..utils.numbers import whole_number
from .cards import Card, card_named

TASKS = ("train", "prefill", "decode")
ARCHITECTURES = ("decoder", "encoder", "translation")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Workload:
    """The attention of a model in one step: all layers, with gradients in training.

    task: "train", forward and backward over `tokens`; "prefill", forward over them; "decode", one token that attends to
    `tokens` earlier ones. architecture: "decoder" is causal, an "encoder" attends both ways, "translation" is the
    cross-attention of `tokens` target tokens to `source_tokens` source tokens. key_heads: the key and value heads of
    each layer, which divide heads. window: positions that a query attends to in a model that has such a mask. local:
    positions within which a task has all that a token needs, so that a window of as many loses nothing. gpu: the card
    of `device="cuda"`, a key of `cards.CARDS`, by whose data sheet times are predicted. memory: bytes for attention,
    None for no limit, or for that of the card. fixed: whether heads and mask are
    those of an existing model, so that only what computes the same may be recommended. positions: its position scheme.

    Raises:
        ConfigurationError: a name that does not exist, a number below 1, key heads that do not divide the heads.
        DeviceError: not the name of a device of torch's.

    >>> Workload("decode", 4096).cache_bytes   # 2 · layers · key heads · tokens · head dim · bytes of a number
    2147483648
    """

    task: str = "prefill"
    tokens: int = 4096
    architecture: str = "decoder"
    source_tokens: int | None = None
    batch: int = 1
    layers: int = 32
    heads: int = 32
    key_heads: int | None = None
    head_dim: int = 128
    window: int | None = None
    local: int | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    gpu: str | None = None
    memory: int | str | None = None
    fixed: bool = False
    positions: str = ""

    def __post_init__(self) -> None:
        for name, names in (("task", TASKS), ("architecture", ARCHITECTURES), ("dtype", tuple(DTYPES))):
            if getattr(self, name) not in names:
                raise ConfigurationError(
                    f"there is no {name} {getattr(self, name)!r}; {nearest(getattr(self, name), names)}"
                )
        if self.architecture == "encoder" and self.task == "decode":
            raise ConfigurationError(
                "an encoder reads all tokens at once and has no task 'decode': say 'prefill', or another architecture"
            )
        for name in ("tokens", "source_tokens", "batch", "layers", "heads", "key_heads", "head_dim", "window", "local"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if self.heads % (self.key_heads or 1):
            raise ConfigurationError(
                f"{self.key_heads} key heads cannot be shared by {self.heads} heads: key_heads has to divide heads"
            )
        if self.source_tokens is not None and self.architecture != "translation":
            raise ConfigurationError(
                f"source_tokens is {self.source_tokens:,}, but a model of architecture {self.architecture!r} has no "
                "source: leave it out, or say architecture='translation'"
            )
        if self.local is not None and (self.window is not None or self.architecture == "translation"):
            other = "window" if self.window is not None else "architecture='translation'"
            raise ConfigurationError(
                f"local is {self.local:,}, the positions that a token needs, and {other} is set too: leave one out"
            )
        if self.gpu is not None:
            object.__setattr__(self, "device", "cuda")
            card_named(self.gpu)
        if isinstance(self.memory, str):
            object.__setattr__(self, "memory", parse_bytes(self.memory))
        elif self.memory is not None:
            whole_number("memory", self.memory)
        try:
            torch.device(self.device)
        except RuntimeError:
            raise DeviceError(
                f"there is no device {self.device!r}: say cpu, cuda or another device of torch's"
            ) from None

    @property
    def queries(self) -> int:
        """Queries of a sequence in a step: one while decoding."""
        return 1 if self.task == "decode" else self.tokens

    @property
    def keys(self) -> int:
        """Keys that a query could attend to."""
        return (self.source_tokens or self.tokens) if self.architecture == "translation" else self.tokens

    @property
    def causal(self) -> bool:
        """Whether a query may attend to no later key; while decoding there is none."""
        return self.architecture == "decoder" and self.task != "decode"

    @property
    def device_type(self) -> str:
        """The kind of device, without its number."""
        return torch.device(self.device).type

    @property
    def card(self) -> Card | None:
        """The card whose data sheet times are predicted by, if one was named."""
        return None if self.gpu is None else card_named(self.gpu)

    @property
    def element_size(self) -> int:
        """Bytes of a number."""
        return DTYPES[self.dtype].itemsize

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values of all layers."""
        return self.bytes_of_keys(self.key_heads or self.heads, self.keys)

    def bytes_of_keys(self, key_heads: int, keys: int) -> int:
        """Bytes of the keys and values of all layers, with so many key heads and positions."""
        return 2 * self.layers * self.batch * key_heads * keys * self.head_dim * self.element_size

    def bytes_of_rows(self) -> int:
        """Bytes of the queries of all layers in a step, or of the outputs."""
        return self.layers * self.batch * self.heads * self.queries * self.head_dim * self.element_size


def parse_bytes(text: str) -> int:
    """A number of bytes: "16GB" (10⁹), "16GiB" (2³⁰), "512 MB" or "1e9".

    Raises:
        ConfigurationError: not a number above 0 with such a unit.

    >>> parse_bytes("16GB"), parse_bytes("1.5 GiB")
    (16000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    try:
        size = float(found[1]) * UNITS[found[2].upper()] if found else math.nan
    except (ValueError, KeyError):
        size = math.nan
    if re.fullmatch(r"\s*[0-9.]+\s*", text) and 0 < size < SMALLEST_PLAIN:
        raise ConfigurationError(
            f"memory {text!r} has no unit, and would be {size:g} bytes: write it as {size:g}GB, or {size:g}B for bytes"
        )
    if not 1 <= size < math.inf:
        raise ConfigurationError(f"memory {text!r} is not a size above 0: write it as 16GB, 16GiB or 512MB")
    return int(size)


SMALLEST_PLAIN = 2**20
"""The smallest number of bytes that is read without a unit: a smaller one was meant in GB."""

CONFIG_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    "key_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "window": ("sliding_window",),
    "dtype": ("dtype", "torch_dtype"),
}
"""Fields of a workload, and their names in config.json files of Hugging Face."""
DECODER_NAMES = {
    "layers": ("num_decoder_layers", "decoder_layers"),
    "heads": ("decoder_attention_heads",),
}
"""The same of an encoder-decoder model, whose cross-attention is in the decoder: looked up first."""
ROTARY_NAMES = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_pct", "rotary_emb_base")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
ENCODERS = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "longformer"),
    *("modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "vit", "xlm-roberta"),
)
"""The `model_type` of models that attend both ways."""


def with_model(workload: Workload, model: Any, chosen: Collection[str] = ()) -> Workload:
    """The workload with the architecture, heads, layers, dtype and window of a model, which advice does not change.

    model: a model of Hugging Face or its configuration, a config.json, or the folder of one. chosen: the fields of the
    workload that the user set.

    Raises:
        ConfigurationError: no such file, a configuration that does not have heads and layers, or a chosen field that
            the model has another number for.
    """
    settings = _settings(model)
    found = {**_read(settings, CONFIG_NAMES)}
    if settings.get("is_encoder_decoder"):
        found |= {"architecture": "translation", **_read(settings, DECODER_NAMES)}
    elif settings.get("model_type") in ENCODERS:
        found["architecture"] = "decoder" if settings.get("is_decoder") else "encoder"
    width = next((settings[name] for name in WIDTHS if settings.get(name) is not None), None)
    missing = [" or ".join(CONFIG_NAMES[name][:2]) for name in ("layers", "heads") if name not in found]
    if width is None and "head_dim" not in found:
        missing.append(f"head_dim or {WIDTHS[0]}")
    if missing:
        raise ConfigurationError(
            f"the configuration of the model has no {', no '.join(missing)}; it has "
            f"{', '.join(sorted(settings)[:12]) or 'nothing'}: leave the model out, and give heads, layers and "
            "head_dim themselves"
        )
    heads = whole_number("heads of the configuration", found["heads"])
    if "head_dim" not in found:
        found["head_dim"] = whole_number(f"{WIDTHS[0]} of the configuration", width) // heads
    if settings.get("use_sliding_window") is False:
        found.pop("window", None)
    dtype = str(found.pop("dtype", "")).removeprefix("torch.")
    if dtype in DTYPES and "dtype" not in chosen:
        found["dtype"] = dtype
    for name in found.keys() & set(chosen):
        if getattr(workload, name) != found[name]:
            raise ConfigurationError(
                f"{name} is {getattr(workload, name)!r}, but the model has {found[name]!r}: leave {name} out, or leave "
                "the model out and give its numbers"
            )
    return replace(workload, **found, fixed=True, positions=_positions(settings, workload.tokens))


def _read(settings: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The settings that exist, by the fields of a workload."""
    found = {
        name: next((settings[own] for own in owns if settings.get(own) is not None), None)
        for name, owns in names.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _positions(settings: Mapping[str, Any], tokens: int) -> str:
    """The position scheme of a configuration, and whether it reaches so many tokens."""
    longest = next((settings[name] for name in ("max_position_embeddings", "n_positions") if settings.get(name)), None)
    if settings.get("relative_attention_num_buckets"):
        return "learned biases by distance, of any length (biases.relative)"
    if settings.get("alibi") or settings.get("model_type") in ("bloom", "mpt"):
        return "ALiBi, of any length (biases.alibi)"
    rotary = any(
        settings.get(name) is not None for name in ("rope_theta", "rope_parameters", "rope_scaling", "rotary_pct")
    )
    scheme = "rotary" if rotary else "sinusoidal" if settings.get("model_type") == "marian" else "learned"
    if not isinstance(longest, int):
        return scheme
    if tokens <= longest:
        return f"{scheme}, for up to {longest:,} tokens"
    mend = "it needs YaRN scaling, and some training" if rotary else "take fewer, or another model"
    return f"{scheme}, for {longest:,} tokens; {tokens:,} are more: {mend}"


def _settings(model: Any) -> Mapping[str, Any]:
    """The settings of a model, of its text part where it has several."""
    if isinstance(model, str | Path):
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        try:
            settings = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigurationError(
                f"cannot read {path}: {error.strerror}; give a config.json, or the folder of one"
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON: {error}") from error
    else:
        config = getattr(model, "config", model)
        settings = config if isinstance(config, Mapping) else getattr(config, "to_dict", lambda: vars(config))()
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f"the configuration of a model is a table of settings, not {type(settings).__name__}")
    return settings["text_config"] if isinstance(settings.get("text_config"), Mapping) else settings
