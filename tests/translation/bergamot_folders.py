"""Folders as Bergamot's students have them, small and random: Marian's binary file, and the formula of its model."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from marian_folders import spm, trained_pieces
from torch import Tensor
from torch.nn.functional import pad

PIECES = [one for one in trained_pieces() if one[0] != "<unk>"]
SIZE = len(PIECES) + 2
DIM, HEADS, HIDDEN, LAYERS = 38, 2, 53, 2
MODEL = f"""\
type: transformer
enc-depth: {LAYERS}
dec-depth: {LAYERS}
dim-emb: {DIM}
transformer-heads: {HEADS}
transformer-dim-ffn: {HIDDEN}
transformer-ffn-depth: 2
transformer-ffn-activation: relu
transformer-preprocess: ""
transformer-postprocess: dan
transformer-postprocess-emb: d
transformer-decoder-autoreg: rnn
dec-cell: ssru
tied-embeddings-all: true
layer-normalization: false
dim-vocabs: [{SIZE}, {SIZE}]
"""
CONFIG = """\
bergamot-mode: native
models: [model.intgemm.alphas.bin]
vocabs: [vocab.spm, vocab.spm]
shortlist: [lex.s2t.bin, false]
beam-size: 1
normalize: 1.0
word-penalty: 0
max-length-break: 128
mini-batch-words: 1024
max-length-factor: 2.0
skip-cost: true
gemm-precision: int8shiftAlphaAll
alignment: soft
"""
FIRST = 3
"""How many first words of the vocabulary the short list always has."""
FLOAT32, INT8, INTGEMM8, INTGEMM16 = 0x404, 0x101, 0x4101, 0x4102


@dataclass(frozen=True)
class Item:
    """One tensor of a binary file: the number of its type, its shape as the file has it, and its bytes."""

    kind: int
    shape: tuple[int, ...]
    content: bytes


def student_tensors() -> dict[str, np.ndarray]:
    """Random weights by Marian's names: matrices (in, out), vectors (1, out)."""
    generator = torch.Generator().manual_seed(11)
    found: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        found[name] = (around + 0.3 * torch.randn(shape, generator=generator)).numpy()

    def add_norm(name: str) -> None:
        add(f"{name}_ln_scale", 1, DIM, around=1.0)
        add(f"{name}_ln_bias", 1, DIM)

    add("Wemb", SIZE, DIM)
    add("decoder_ff_logit_out_b", 1, SIZE)
    for layer in range(1, LAYERS + 1):
        for attention in (f"encoder_l{layer}_self", f"decoder_l{layer}_context"):
            for letter in "qkvo":
                add(f"{attention}_W{letter}", DIM, DIM)
                add(f"{attention}_b{letter}", 1, DIM)
            add_norm(f"{attention}_Wo")
        recurrent = f"decoder_l{layer}_rnn"
        add(f"{recurrent}_W", DIM, DIM)
        add(f"{recurrent}_Wf", DIM, DIM)
        add(f"{recurrent}_bf", 1, DIM)
        add_norm(f"{recurrent}_ffn")
        for stack in (f"encoder_l{layer}", f"decoder_l{layer}"):
            add(f"{stack}_ffn_W1", DIM, HIDDEN)
            add(f"{stack}_ffn_b1", 1, HIDDEN)
            add(f"{stack}_ffn_W2", HIDDEN, DIM)
            add(f"{stack}_ffn_b2", 1, DIM)
            add_norm(f"{stack}_ffn_ffn")
    return found


def is_rounded(name: str) -> bool:
    """Whether the packer rounds a tensor: those that end in _W and at most one letter, and tables of embeddings."""
    return "Wemb" in name or name.rsplit("_W", 1)[-1] in ("", *"qkvoft12")


def rounded(tensors: Mapping[str, np.ndarray], bits: int = 8) -> dict[str, np.ndarray]:
    """The weights that a file of eight or sixteen bits has: whole numbers over one scale a matrix, in float64."""
    found = {}
    for name, values in tensors.items():
        if not is_rounded(name):
            found[name] = values.astype(np.float64)
            continue
        scale = scale_of(values, bits)
        found[name] = np.round(np.float64(values) * scale) / scale
    return found


def scale_of(values: np.ndarray, bits: int = 8) -> float:
    """What a matrix is multiplied by before it is rounded, a number of single precision."""
    return float(np.float32(127 / np.abs(values).max())) if bits == 8 else 1024.0


def items(tensors: Mapping[str, np.ndarray], bits: int = 8, kinds: tuple[int, int] = (INTGEMM8, INTGEMM16)) -> dict:
    """The tensors as the packer writes them: matrices transposed, tables not, the scale behind the numbers."""
    found = {}
    for name, values in tensors.items():
        if not is_rounded(name):
            found[name] = Item(FLOAT32, values.shape, values.astype("<f4").tobytes())
            continue
        scale = scale_of(values, bits)
        numbers = np.round(np.float64(values) * scale).astype("<i1" if bits == 8 else "<i2")
        content = (numbers if "Wemb" in name else numbers.T).tobytes() + struct.pack("<f", scale)
        found[name] = Item(kinds[bits == 16], values.shape, content)
        found[f"{name}_QuantMultA"] = Item(FLOAT32, (1,), struct.pack("<f", 3.5))
    return found


def float_items(tensors: Mapping[str, np.ndarray]) -> dict[str, Item]:
    """The tensors as a binary file of single precision has them."""
    return {name: Item(FLOAT32, one.shape, one.astype("<f4").tobytes()) for name, one in tensors.items()}


def write_bin(path: Path, entries: Mapping[str, Item], text: str = MODEL, *, version: int = 1, aligned: bool = True):
    """Write a binary file of Marian; `aligned`, each tensor's data fills whole blocks of 256 bytes."""
    settings = text.encode() + b"\0"
    entries = {**entries, "special:model.yml": Item(INT8, (len(settings),), settings)}
    contents = [one.content + bytes(-len(one.content) % 256 if aligned else 0) for one in entries.values()]
    header = struct.pack("<QQ", version, len(entries))
    for (name, one), content in zip(entries.items(), contents, strict=True):
        header += struct.pack("<QQQQ", len(name.encode()) + 1, one.kind, len(one.shape), len(content))
    header += b"".join(name.encode() + b"\0" for name in entries)
    header += b"".join(struct.pack(f"<{len(one.shape)}i", *one.shape) for one in entries.values())
    padding = -(len(header) + 8) % 256
    path.write_bytes(header + struct.pack("<Q", padding) + bytes(padding) + b"".join(contents))


def lexicon() -> list[list[int]]:
    """For each source word two target words, at random."""
    generator = torch.Generator().manual_seed(12)
    return [sorted(torch.randperm(SIZE, generator=generator)[:2].tolist()) for _ in range(SIZE)]


def listed(source: list[int]) -> list[int]:
    """The words that a sentence may become by the lexicon: the first, those of its words, and its words themselves."""
    return sorted({*range(FIRST), *source, *(word for token in source for word in lexicon()[token])})


def write_short_list(path: Path, words: list[list[int]], first: int = FIRST) -> None:
    """Write a short list in Marian's binary form; its checksum is none."""
    starts = [0]
    for own in words:
        starts.append(starts[-1] + len(own))
    flat = [word for own in words for word in own]
    header = struct.pack("<6Q", 0xF11A48D5013417F5, 1, first, 2, len(starts), len(flat))
    path.write_bytes(header + struct.pack(f"<{len(starts)}Q", *starts) + struct.pack(f"<{len(flat)}I", *flat))


def write_student(folder: Path, entries: Mapping[str, Item] | None = None, text: str = MODEL) -> None:
    """Write the folder of a student: its settings, its model, its vocabulary, its short list."""
    entries = items(student_tensors()) if entries is None else entries
    write_short_list(folder / "lex.s2t.bin", lexicon())
    (folder / "config.intgemm8bitalpha.yml").write_text(CONFIG)
    (folder / "vocab.spm").write_bytes(spm(PIECES))
    write_bin(folder / "model.intgemm.alphas.bin", entries, text)


def formula(tensors: Mapping[str, np.ndarray], source: list[int], target: list[int], dtype: torch.dtype) -> Tensor:
    """Logits [len(target) + 1, SIZE] of a student: those of each token of the target, and of what follows."""
    w = {name: torch.from_numpy(np.float64(values)).to(dtype) for name, values in tensors.items()}
    table = w["Wemb"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}_ln_scale"]
            + w[f"{name}_ln_bias"]
        )

    def attend(x: Tensor, memory: Tensor, name: str) -> Tensor:
        q, k, v = (of @ w[f"{name}_W{i}"] + w[f"{name}_b{i}"] for of, i in ((x, "q"), (memory, "k"), (memory, "v")))
        heads = []
        for one in range(HEADS):
            part = slice(one * DIM // HEADS, (one + 1) * DIM // HEADS)
            weights = (q[:, part] @ k[:, part].T / math.sqrt(DIM // HEADS)).softmax(-1)
            heads.append(weights @ v[:, part])
        return norm(x + torch.cat(heads, 1) @ w[f"{name}_Wo"] + w[f"{name}_bo"], f"{name}_Wo")

    def feed_forward(x: Tensor, name: str) -> Tensor:
        hidden = (x @ w[f"{name}_W1"] + w[f"{name}_b1"]).clamp(min=0)
        return norm(x + hidden @ w[f"{name}_W2"] + w[f"{name}_b2"], f"{name}_ffn")

    def recurrent(x: Tensor, name: str) -> Tensor:
        state, outputs = x.new_zeros(DIM), []
        for token in x:
            forget = 1 / (1 + torch.exp(-(token @ w[f"{name}_Wf"] + w[f"{name}_bf"][0])))
            state = forget * state + (1 - forget) * (token @ w[f"{name}_W"])
            outputs.append(state.clamp(min=0))
        return norm(x + torch.stack(outputs), f"{name}_ffn")

    x = table[source] * math.sqrt(DIM) + _positions(len(source)).to(dtype)
    for layer in range(1, LAYERS + 1):
        x = feed_forward(attend(x, x, f"encoder_l{layer}_self"), f"encoder_l{layer}_ffn")
    # What stands before a translation is a vector of zeros.
    y = pad(table[target], (0, 0, 1, 0)) * math.sqrt(DIM) + _positions(len(target) + 1).to(dtype)
    for layer in range(1, LAYERS + 1):
        y = attend(recurrent(y, f"decoder_l{layer}_rnn"), x, f"decoder_l{layer}_context")
        y = feed_forward(y, f"decoder_l{layer}_ffn")
    return y @ table.T + w["decoder_ff_logit_out_b"]


def _positions(count: int) -> Tensor:
    """All sines, then all cosines, of p · 10000^(-i / (n - 1)), as numbers of single precision."""
    n = DIM // 2
    radians = torch.arange(count).double()[:, None] * 10000 ** (-torch.arange(n).double() / (n - 1))
    return torch.cat([radians.sin(), radians.cos()], 1).float()
