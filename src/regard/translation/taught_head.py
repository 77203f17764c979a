"""Guided alignment of a translator that exists: one head is taught by links of words, while it goes on translating."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import CheckpointError, ConfigurationError, CorpusError
from regard.heads.word_alignment import Link
from regard.models import Transformer
from regard.models.decoded_target import SourceHead
from regard.models.transformer.marian_checkpoint import bart_layer_name
from regard.models.transformer.pretrained_tensors import open_translator
from regard.translation.batches import EncodedText, IdSequences, collate
from regard.translation.checkpoint import EXTRA, read_header, save_weights
from regard.translation.pretrained_export import new_folder
from regard.translation.pretrained_translator import is_pretrained
from regard.translation.run_folder import RunFolder, Which
from regard.translation.training_loss import projected_cross_entropy
from regard.translation.vocabulary import SpecialIds
from regard.translation.weight_losses import alignment_loss
from regard.utils.safetensors_files import write_tensors

SMOOTHING = 0.1
"""Of the labels of the cross entropy."""
_TAUGHT = ("query", "key")
_T5_NAMES = {"query": "q", "key": "k"}


@dataclass(frozen=True)
class Teaching:
    """How a head is taught.

    updates: steps of Adam. learning_rate: of the first one; it falls to 0 linearly. weight: of the loss of alignment,
    beside 1 of the cross entropy of words. batch_size: pairs of an update, drawn by `seed`.
    """

    updates: int = 300
    learning_rate: float = 1e-3
    weight: float = 0.5
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "learning_rate", "weight", "batch_size"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it needs to be above 0")


def linked_text(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    words: Sequence[tuple[Sequence[int], Sequence[int]]],
    links: Sequence[Collection[Link]],
) -> EncodedText:
    """Pairs of ids with the links of their tokens: each token of a word with each of a word that it is linked with.

    words: the word of each token of both sides of a pair. Pairs without a link are left out.

    Raises:
        CorpusError: none is left.
    """
    rows, tokens = [], []
    for row, ((source_words, target_words), some) in enumerate(zip(words, links, strict=True)):
        found = [
            place
            for target, target_word in enumerate(target_words)
            for source, source_word in enumerate(source_words)
            if (source_word, target_word) in some
            for place in (target, source)
        ]
        if found:
            rows.append(row)
            tokens.append(found)
    if not rows:
        raise CorpusError(f"none of the {len(links):,} pairs has a link between its words: there is nothing to teach")
    source, target = (IdSequences.pack([side[row] for row in rows]) for side in (sources, targets))
    return EncodedText(source, target, links=IdSequences.pack(tokens))


def taught_model(model: object) -> Transformer:
    """The model, if it has heads that can be taught.

    Raises:
        ConfigurationError: it is no Transformer.
    """
    if not isinstance(model, Transformer):
        raise ConfigurationError(f"{type(model).__name__} is no Transformer, and has no head that could be taught")
    return model


def teach_head(
    model: Transformer, text: EncodedText, place: SourceHead, special: SpecialIds, teaching: Teaching
) -> None:
    """Train the queries and keys of one layer's attention to the source, so that one head links words.

    What is minimised is the cross entropy of the words, with smoothed labels, and `alignment_loss` of the head's
    weights at the step that says each word; everything else of the model stays as it is.

    Raises:
        ConfigurationError: there is no such head.

    Source: Garg et al. 2019 (arXiv 1909.02074), section 4.2, without their second pass over the whole target; Chen et
    al. 2016 (arXiv 1607.01628). They train all weights, and from scratch.
    """
    layer, _ = model.checked_place(place)
    taught = [
        parameter
        for name, parameter in model.decoder.blocks[layer].named_parameters()
        if name.startswith("cross_attention.") and name.split(".")[-2] in _TAUGHT
    ]
    device, draw = taught[0].device, np.random.default_rng(teaching.seed)
    optimizer = torch.optim.Adam(taught, lr=teaching.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, teaching.updates)
    with _alone(model, taught), torch.enable_grad():
        for _ in range(teaching.updates):
            rows = draw.choice(len(text), min(teaching.batch_size, len(text)), replace=False)
            batch = collate(text, rows, special).to(device)
            decoded = model.decode_target(batch.source, batch.source_lengths, batch.target_input, observe=place)
            steps = torch.arange(batch.target_output.shape[1], device=device)
            there = steps <= torch.from_numpy(text.targets.lengths[rows]).to(device)[:, None]
            features, said = decoded.features[there], batch.target_output[there]
            loss, _ = projected_cross_entropy(features, model.output.weight, model.output.bias, said, SMOOTHING)
            weights, links = cast("Tensor", decoded.weights), cast("Tensor", batch.links)  # both were asked for
            loss = loss + teaching.weight * alignment_loss(weights, links)
            optimizer.zero_grad()
            (loss / batch.target_tokens).backward()
            nn.utils.clip_grad_norm_(taught, 1.0)
            optimizer.step()
            schedule.step()


@contextmanager
def _alone(model: nn.Module, taught: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients for these parameters alone while the block runs."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    chosen = set(map(id, taught))
    try:
        for parameter in before:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.requires_grad_(gradient)
            parameter.grad = None


def write_taught(origin: Path, which: Which, folder: Path, model: Transformer, layer: int) -> None:
    """Write a copy of a translator's folder with the weights of a layer that was taught.

    The copy has neither what `--calibrate` has found, as its translations differ, nor weights of other kinds.

    Raises:
        CheckpointError: the new folder holds something already, or cannot be written.
    """
    with new_folder(folder) as partial:
        if is_pretrained(origin):
            _copy_pretrained(origin, partial, model, layer)
        else:
            run, copy = RunFolder(origin), RunFolder(partial)
            for one, other in (
                (run.experiment, copy.experiment),
                (run.source_vocabulary, copy.source_vocabulary),
                (run.target_vocabulary, copy.target_vocabulary),
                (run.placeholders, copy.placeholders),
            ):
                if one.exists() or one != run.placeholders:
                    shutil.copyfile(one, other)
            save_weights(model, partial / "best.safetensors", read_header(run.weights(which)))


def _copy_pretrained(origin: Path, folder: Path, model: Transformer, layer: int) -> None:
    for path in origin.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".h5", ".msgpack") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != RunFolder(origin).trust.name:
            shutil.copyfile(path, folder / path.name)
    tensors = {name: stored.read() for name, stored in open_translator(origin).items()}
    state = model.state_dict()
    for kind, part in itertools.product(_TAUGHT, ("weight", "bias")):
        name = f"decoder.blocks.{layer}.cross_attention.projections.{kind}.{part}"
        if name in state:
            theirs = _stored_name(name, tensors)
            tensors[theirs] = state[name].detach().cpu().to(tensors[theirs].dtype)
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"}, EXTRA)


def _stored_name(name: str, stored: Collection[str]) -> str:
    """The name of a query's or key's parameter in a model that descends from BART, or in T5."""
    _, _, layer, _, _, kind, part = name.split(".")
    names = bart_layer_name(name), f"decoder.block.{layer}.layer.1.EncDecAttention.{_T5_NAMES.get(kind)}.{part}"
    found = next((one for one in names if one in stored), None)
    if found is None:
        raise CheckpointError(
            f"the weights have neither {names[0]} nor {names[1]}: this kind of model cannot be taught"
        )
    return found
