"""Read a Transformer that Marian itself saved, an .npz or .bin with its settings inside, into a `Transformer`."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import CheckpointError
from ...masks import causal
from ...nn import SSRU, Attention, FeedForward, PostNorm, Projections, TransformerBlock
from ...nn.feedforward import Activation
from ...positions import Tensor2TensorSinusoidal
from .encoder_decoder import Decoder, Embedding, Encoder, TiedOutput
from .marian_binary import read_binary
from .transformer import Transformer

SETTINGS = "special:model.yml"
"""The entry with the settings: a YAML text as bytes."""
ACTIVATION_SCALE = "_QuantMultA"
"""How the names end of what Marian multiplies the input of a product by before it rounds it to eight bits."""
UNTIED = "decoder_ff_logit_out_Wt"
"""An output layer of its own, (target vocabulary, dim) as a table of embeddings; older models have it transposed."""
NEVER = -1e9
"""The logit of what stands before a translation: so far below all others that it has no probability."""
EPS = 1e-6
"""Of Marian's layer normalisation; transformers has 1e-5 for the same models."""


def _marian_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Activation] = {"relu": functional.relu, "swish": functional.silu, "gelu": _marian_gelu}
# The settings that change the arithmetic, and the values of which it is read here; the first is Marian's default.
_READ: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-preprocess": ("", "d"),
    "transformer-postprocess": ("dan", "an"),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-postprocess-top": ("", "d"),
    "transformer-decoder-autoreg": ("self-attention", "rnn"),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-tied-layers": ([],),
    "transformer-train-position-embeddings": (False,),
    "transformer-no-projection": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-rnn-projection": (False, True),
    "transformer-pool": (False,),
    "transformer-disable-position-embeddings": (False,),
    "embedding-fix-src": (False, True),
    "lemma-dim-emb": (0,),
    "factors-combine": ("sum",),
    "input-types": ([],),
}
_RECURRENT = {
    "attention.value.weight": "rnn_W",
    "attention.forget.weight": "rnn_Wf",
    "attention.forget.bias": "rnn_bf",
    "attention_residual.norm.weight": "rnn_ffn_ln_scale",
    "attention_residual.norm.bias": "rnn_ffn_ln_bias",
}
"""Of a layer with an SSRU, what is there in the place of self-attention."""
# Of a layer: *.blocks.0.* here, encoder_l1_* there, without the sides of a projection.
_PARTS = {
    "attention.projections.": "self_",
    "attention_residual.norm.": "self_Wo_ln_",
    "cross_attention.projections.": "context_",
    "cross_residual.norm.": "context_Wo_ln_",
    "feed_forward.": "ffn_",
    "feed_forward_residual.norm.": "ffn_ffn_ln_",
}
_LETTERS = {"query": "q", "key": "k", "value": "v", "output": "o", "up": "1", "down": "2"}


@dataclass(frozen=True)
class MarianFile:
    """The tensors of a model of Marian by its names, and its settings as their YAML."""

    path: Path
    tensors: dict[str, np.ndarray]
    settings_text: str

    @classmethod
    def read(cls, path: Path) -> MarianFile:
        """Read a .bin by `read_binary`, any other file as .npz; nothing is unpickled.

        Scales for rounding what is multiplied, which models of eight bits may have, are left out.

        Raises:
            CheckpointError: it cannot be read, is neither, or has no settings of Marian.
        """
        tensors = read_binary(path) if path.suffix == ".bin" else _read_npz(path)
        text = tensors.pop(SETTINGS, None)
        if text is None:
            raise CheckpointError(f"{path} has no entry {SETTINGS!r}, where Marian keeps the settings of a model")
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not (name.startswith("special:") or name.endswith(ACTIVATION_SCALE))
        }
        return cls(path, tensors, text.astype(np.uint8).tobytes().decode("utf-8", "replace").rstrip("\0"))

    def load(self, settings: Mapping[str, Any]) -> Transformer:
        """The model, in float32; `settings` are those of `settings_text`.

        The table of the target has one row more, of zeros: what Marian puts before a translation.

        Raises:
            CheckpointError: a setting that is missing, or that changes what is computed and is not read here; tensors
                that are missing, extra, of another shape, or of whole numbers.
        """
        known = _MarianSizes.read(self.path, settings, self.tensors)
        model, used, found = known.build(), set[str](), dict[str, Tensor]()
        for name, tensor in model.state_dict().items():
            theirs = known.stored_name(name)
            if theirs not in self.tensors:
                raise CheckpointError(f"{self.path} has no {theirs}, which a model of its settings has")
            used.add(theirs)
            found[name] = self._converted(name, theirs, tensor)
        if extra := sorted(self.tensors.keys() - used):
            raise CheckpointError(f"{self.path} has {', '.join(extra[:3])}, which a model of its settings has not")
        model.load_state_dict(found)
        return model.eval()

    def _converted(self, name: str, theirs: str, needed: Tensor) -> Tensor:
        stored = self.tensors[theirs]
        if not np.issubdtype(stored.dtype, np.floating):
            raise CheckpointError(f"{theirs} in {self.path} is {stored.dtype}: weights need floating-point numbers")
        values = torch.from_numpy(stored.astype(np.float32))
        is_table = name.endswith("tokens.weight")
        if needed.ndim == 1:
            values = values.reshape(-1) if 1 in values.shape or values.ndim == 1 else values
        elif not is_table and theirs != UNTIED:
            values = values.T
        if name in ("output.weight", "output.bias") or is_table:
            before = values.new_full((1, *values.shape[1:]), NEVER if name == "output.bias" else 0)
            values = torch.cat([values, before])
        if values.shape != needed.shape:
            raise CheckpointError(
                f"{theirs} in {self.path} has the shape {stored.shape}, and a model of its settings another one"
            )
        return values.contiguous()


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise CheckpointError(f"{path} is truncated or no .npz of Marian ({error})") from None


@dataclass(frozen=True)
class _MarianSizes:
    """What the settings of Marian say of the arithmetic of a model, and the sizes of its vocabularies."""

    dim: int
    heads: int
    hidden_dims: tuple[int, int]
    layers: tuple[int, int]
    activation: str
    is_recurrent: bool
    tables: tuple[str, str]
    output: str | None
    sizes: tuple[int, int]

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> _MarianSizes:
        for name, allowed in _READ.items():
            value = settings.get(name, allowed[0])
            if value not in allowed:
                raise CheckpointError(
                    f"{path} says {name}: {value!r}, which changes what the model computes and is not read here; read "
                    f"is {' and '.join(map(repr, allowed))}"
                )
        activation = settings.get("transformer-ffn-activation", "swish")
        if activation not in _ACTIVATIONS:
            raise CheckpointError(
                f"{path} says transformer-ffn-activation: {activation!r}; read are {', '.join(_ACTIVATIONS)}"
            )
        recurrent = settings.get("transformer-decoder-autoreg") == "rnn"
        if recurrent and settings.get("dec-cell") != "ssru":
            raise CheckpointError(
                f"{path} says dec-cell: {settings.get('dec-cell')!r}, a recurrent layer that is not read here; read is "
                "'ssru'"
            )
        shared, tied = (settings.get(name, False) is True for name in ("tied-embeddings-all", "tied-embeddings"))
        one = shared or settings.get("tied-embeddings-src", False) is True
        tables = ("Wemb", "Wemb") if one else ("encoder_Wemb", "decoder_Wemb")
        missing = [name for name in dict.fromkeys(tables) if name not in tensors]
        if missing:
            raise CheckpointError(f"{path} has no {missing[0]}, which a model of its settings has")
        hidden = _whole(path, settings, "transformer-dim-ffn")
        of_decoder = settings.get("transformer-decoder-dim-ffn", 0) != 0
        return cls(
            dim=_whole(path, settings, "dim-emb"),
            heads=_whole(path, settings, "transformer-heads"),
            hidden_dims=(hidden, _whole(path, settings, "transformer-decoder-dim-ffn") if of_decoder else hidden),
            layers=(_whole(path, settings, "enc-depth"), _whole(path, settings, "dec-depth")),
            activation=activation,
            is_recurrent=recurrent,
            tables=tables,
            output=None if shared or tied else UNTIED if UNTIED in tensors else UNTIED.removesuffix("t"),
            sizes=(len(tensors[tables[0]]), len(tensors[tables[1]])),
        )

    def build(self) -> Transformer:
        """A model of these sizes, freshly initialised."""
        target = nn.Embedding(self.sizes[1] + 1, self.dim)
        source = target if self.tables[0] == self.tables[1] else nn.Embedding(self.sizes[0] + 1, self.dim)
        output = TiedOutput(target, bias=True) if self.output is None else nn.Linear(self.dim, self.sizes[1] + 1)
        return Transformer(
            Embedding(source, Tensor2TensorSinusoidal(self.dim)),
            Embedding(target, Tensor2TensorSinusoidal(self.dim)),
            encoder=Encoder([self._block() for _ in range(self.layers[0])]),
            decoder=Decoder([self._block(decoder=True) for _ in range(self.layers[1])]),
            output=output,
        )

    def _block(self, *, decoder: bool = False) -> TransformerBlock:
        recurrent = decoder and self.is_recurrent
        own = None if recurrent else Attention(Projections(self.dim, self.heads), mask=causal() if decoder else None)
        return TransformerBlock(
            SSRU(self.dim) if own is None else own,
            FeedForward(self.dim, self.hidden_dims[decoder], activation=_ACTIVATIONS[self.activation]),
            lambda: PostNorm(nn.LayerNorm(self.dim, EPS)),
            cross_attention=Attention(Projections(self.dim, self.heads)) if decoder else None,
        )

    def stored_name(self, name: str) -> str:
        """The name of a parameter of `Transformer` in Marian's file."""
        layer = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", name)
        if layer is None:
            return {
                "source_embedding.tokens.weight": self.tables[0],
                "target_embedding.tokens.weight": self.tables[1],
                "output.tokens.weight": self.tables[1],
                "output.weight": self.output or "",
                "output.bias": "decoder_ff_logit_out_b",
            }[name]
        if self.is_recurrent and layer[1] == "decoder" and layer[3] in _RECURRENT:
            return f"decoder_l{int(layer[2]) + 1}_{_RECURRENT[layer[3]]}"
        ours = next(part for part in _PARTS if layer[3].startswith(part))
        *sides, kind = layer[3].removeprefix(ours).split(".")
        if ours.endswith("norm."):
            part = "scale" if kind == "weight" else "bias"
        else:
            part = ("W" if kind == "weight" else "b") + _LETTERS[sides[0]]
        return f"{layer[1]}_l{int(layer[2]) + 1}_{_PARTS[ours]}{part}"


def _whole(path: Path, settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if type(value) is not int or not 1 <= value < 2**26:
        raise CheckpointError(f"{path} says {name}: {value!r}; it needs a whole number of at least 1")
    return value
