"""Checks that compute the same in two ways: with and without a cache, by other backends, in training and evaluation."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard_doctor.finding import Severity

from .examination_report import ModelFinding, finding
from .finding_map import difference_map, disagreement, moves
from .padding_masks import of_positions
from .rounding_noise import Noise
from .softmax_capture import capture_weights
from .subject import CACHES, KEEP_MASKS, SkippedCheck, Subject, dropouts, fresh, largest

RETURNED_WEIGHTS = (
    "output_attentions",
    "return_attention_scores",
    "need_weights",
    "return_weights",
    "return_attention",
)
"""Options that return attention weights, too."""
CLEARLY = 0.9
"""A time below this part of another one is less by more than chance."""
CHUNK = 5
"""Tokens of a chunk."""


def _cached_steps(subject: Subject, sizes: Sequence[int], name: str, *, with_positions: bool = False) -> Tensor:
    """Outputs of the sequence in parts of these sizes, each after the cache of the last.

    The cache is what the model returns, or an object of the batch that it changes. with_positions: pass `position_ids`.
    """
    cache, parts, start = fresh(subject.inputs.get(name)), [], 0
    keywords: dict[str, Any] = {"use_cache": True} if "use_cache" in subject.parameters else {}
    if "attention_mask" in subject.inputs and str(subject.key) == "input_ids":
        keywords["attention_mask"] = None
    for size in sizes:
        part = subject.sequence[:, start : start + size]
        keywords |= _of_part(subject, start, size)
        if with_positions:
            positions = torch.arange(start, start + part.shape[1], device=part.device)
            keywords["position_ids"] = positions.repeat(part.shape[0], 1)
        output = subject.run(part, **keywords, **({} if cache is None else {name: cache}))
        parts.append(subject.outputs_of(output))
        returned = _cache_in(output)
        cache = cache if returned is None else returned
        if cache is None:
            raise SkippedCheck("the model returns no cache")
        start += size
    return torch.cat(parts, dim=1)


def _cache_in(output: Any) -> Any:
    for name in CACHES:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if value is not None:
            return value
    return output[1] if isinstance(output, tuple) and len(output) == 2 else None


def _of_part(subject: Subject, start: int, size: int) -> dict[str, Any]:
    """Keywords of the batch that have an entry for each position, cut to those of a part; masks to all so far.

    Raises:
        SkippedCheck: a mask of pairs, whose rows and columns are cut in one way by one model and in another by others.
    """
    cut = {}
    for name, value in of_positions(subject):
        if name == "attention_mask" and value.ndim == 2:
            continue
        if value.ndim > 2 and list(value.shape[1:]).count(subject.length) > 1:
            raise SkippedCheck(f"{name} of the batch is of pairs, not of tokens")
        if value.ndim > 1 and value.shape[1] == subject.length:
            cut[name] = value[:, 0 if "mask" in name else start : start + size]
    return cut


def _positions_mend(subject: Subject, sizes: Sequence[int], name: str, whole: Tensor, noise: Noise) -> bool:
    """Whether steps with a cache agree with the whole sequence once the model is told their positions."""
    if "position_ids" not in subject.parameters:
        return False
    try:
        outputs = _cached_steps(subject, sizes, name, with_positions=True)
    except Exception:
        return False
    return largest(outputs - whole) <= noise.other_shape


def check_cache(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN120: the sequence in chunks, and token by token, with a cache, has other outputs than at once."""
    name = subject.names.cache or subject.argument(CACHES)
    if subject.pooled:
        raise SkippedCheck(subject.outputs_in_words)
    if name is None:
        raise SkippedCheck(f"the model takes no cache ({', '.join(CACHES)})")
    if subject.causal is False:
        raise SkippedCheck("the model is bidirectional")
    mask: dict[str, Any] = {"attention_mask": None} if str(subject.key) == "input_ids" else {}
    whole = subject.outputs(**mask)
    length, found = subject.length, []
    chunks = [CHUNK] * -(-length // CHUNK)
    steps = [length // 2] + [1] * (length - length // 2)
    for words, sizes in ((f"chunks of {CHUNK} tokens", chunks), ("single tokens after half of it", steps)):
        try:
            outputs = _cached_steps(subject, sizes, name)
        except SkippedCheck:
            raise
        except Exception as error:
            message = f"{words} with a cache raise {type(error).__name__}: {str(error)[:120]}"
            found.append(finding("RUN120", message, severity=Severity.WARNING))
            continue
        by_position = moves(outputs - whole)
        if float(by_position.max()) > noise.other_shape:
            first = int((by_position > noise.other_shape).nonzero()[0])
            message = f"{words} with a cache give other outputs than the sequence at once, from position {first} on"
            if _positions_mend(subject, sizes, name, whole, noise):
                message += ": the model counts positions wrongly, position_ids of the tokens mend it"
            title = f"Outputs of {words} with a cache, and of the sequence at once"
            maps = difference_map(subject, outputs - whole, noise.other_shape, title=title)
            evidence = {"moved": first, "by": float(by_position.max()), "tolerance": noise.other_shape}
            found.append(finding("RUN120", message, maps=maps, **evidence))
    return found


def with_attention(subject: Subject, implementation: str) -> Subject:
    """A copy of a model of transformers with another attention implementation; 'regard' is what `swap` makes of it.

    Raises:
        SkippedCheck: none of its attentions can be selected.
    """
    from ..huggingface import swap

    other = subject.copied()
    model: Any = other.model
    if implementation != "regard":
        model.set_attn_implementation(implementation)
    elif not swap(model).replaced:
        raise SkippedCheck("no attention of the model can be selected")
    return other


def _short(error: Exception) -> str:
    words = str(error)[:120]
    return words if isinstance(error, SkippedCheck) else f"{type(error).__name__}: {words}"


def check_backends(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN121: eager attention, torch's SDPA and regard give different outputs, or regard raises where eager runs."""
    if not subject.is_huggingface:
        raise SkippedCheck("no model of transformers, whose attention can be selected")
    outputs: dict[str, Tensor] = {}
    failures: dict[str, Exception] = {}
    own = getattr(subject.model.config, "_attn_implementation", None)
    for name in dict.fromkeys(("eager", "sdpa", "regard", own if isinstance(own, str) else "eager")):
        try:
            outputs[name] = with_attention(subject, name).outputs()
        except Exception as error:
            failures[name] = error
    if "eager" not in outputs or len(outputs) < 2:
        raise SkippedCheck("; ".join(f"{name}: {_short(error)}" for name, error in failures.items()))
    found, ours = [], failures.get("regard")
    if ours is not None and not isinstance(ours, SkippedCheck):
        found.append(finding("RUN121", f"attn_implementation='regard' raises {_short(ours)}, where 'eager' runs"))
    for name, value in outputs.items():
        message = f"attn_implementation={name!r} gives other outputs than 'eager'"
        difference, title = value - outputs["eager"], f"Outputs by {name!r} and by 'eager'"
        found += disagreement(subject, "RUN121", message, difference, noise.other_shape, title=title)
    return found


def _without_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0: modules, and attributes with dropout or drop_path in their name."""
    config = getattr(model, "config", None)
    for owner in (*model.modules(), *([config] if hasattr(config, "__dict__") else [])):
        if isinstance(owner, nn.modules.dropout._DropoutNd):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
                with contextlib.suppress(AttributeError):  # a frozen configuration, whose modules have their own number
                    setattr(owner, name, 0.0)


def check_training(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN122: without dropout, training computes other outputs than evaluation."""
    other = subject.copied()
    _without_dropout(other.model)
    expected = other.outputs()
    other.model.train()
    for module in other.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # statistics of the batch are meant
    try:
        first, second = other.outputs(seed=0), other.outputs(seed=1)
    except Exception as error:
        raise SkippedCheck(f"does not run in training: {type(error).__name__}: {str(error)[:120]}") from error
    if largest(first - second) > noise.same_shape:
        raise SkippedCheck("training is random though every dropout is 0")
    if first.shape != expected.shape:
        raise SkippedCheck("training returns another shape")
    message = "with every dropout 0, train() gives other outputs than eval()"
    title = "Outputs in training and in evaluation"
    return disagreement(subject, "RUN122", message, first - expected, noise.other_shape, title=title)


def _options(subject: Subject) -> dict[str, dict[str, Any]]:
    """Keywords that must not change the outputs, by what they are."""
    found: dict[str, dict[str, Any]] = {}
    for name in RETURNED_WEIGHTS:
        if name in subject.parameters and not subject.keywords.get(name):
            found[f"{name}=True"] = {name: True}
    mask = subject.argument(KEEP_MASKS)
    if mask is not None and subject.keywords.get(mask) is None and "decoder" not in str(subject.key):
        ones = torch.ones(subject.batch_size, subject.length, dtype=torch.long, device=subject.sequence.device)
        found[f"a {mask} of ones"] = {mask: ones}
        found[f"a {mask} of True, (batch, 1, 1, length)"] = {mask: ones.bool()[:, None, None]}
    return found


def check_options(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN124: options that only return more, or a mask that hides nothing, change the outputs."""
    base, found, ran = subject.outputs(), [], False
    for words, changes in _options(subject).items():
        if ran and "of True" in words:
            continue  # the mask is one of tokens
        try:
            output = subject.outputs(**changes)
        except Exception:
            continue  # not what this model takes
        ran = ran or "mask" in words
        if output.shape == base.shape:
            found += disagreement(subject, "RUN124", f"{words} changes outputs", output - base, noise.other_shape)
    return found


def check_state(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN125: a call in evaluation changes a dropout of the model, and so the training after it."""
    before, after = subject.dropouts, dropouts(subject.model)
    changed = [name for name, value in before.items() if after.get(name) != value]
    if not changed:
        return []
    words = [f"{'.'.join(filter(None, one))} from {before[one]:g} to {after.get(one, math.nan):g}" for one in changed]
    return [finding("RUN125", f"a call in evaluation sets {', '.join(words[:3])}")]


def check_random(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN123: evaluation depends on the random seed, as with a dropout that is active."""
    if not noise.is_random:
        return []
    moved = subject.outputs(seed=1) - subject.outputs(seed=0)
    position = int(moved.abs().nan_to_num().amax((0, 2)).argmax())
    message = "eval() gives other outputs with another random seed: a dropout is active"
    maps = difference_map(subject, moved.nan_to_num(), noise.unit, title="Outputs by two random seeds")
    return [finding("RUN123", message, moved=position, by=noise.seeds, maps=maps)]


def _seconds(subjects: Sequence[Subject], rounds: int = 5) -> list[float]:
    """Median seconds of a run of each, alternating."""
    times: list[list[float]] = [[] for _ in subjects]
    for _ in range(rounds):
        for subject, taken in zip(subjects, times, strict=True):
            start = time.perf_counter()
            subject.run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def check_eager(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN131: a model of transformers computes attention eagerly though another way is faster here."""
    if not subject.is_huggingface:
        raise SkippedCheck("no model of transformers, whose attention can be selected")
    if getattr(subject.model.config, "_attn_implementation", None) != "eager":
        raise SkippedCheck("attention is not eager")
    if not any(one.kind == "softmax" for one in capture_weights(subject)):
        raise SkippedCheck("no eager attention ran")
    faster = []
    for name in ("sdpa", "regard"):
        try:
            eager, seconds = _seconds([subject, with_attention(subject, name)])
        except Exception:
            continue
        if seconds < CLEARLY * eager:
            faster.append(f"{name} takes {seconds / eager:.2f} of its time")
    if not faster:
        return []
    words = " and ".join(faster)
    return [finding("RUN131", f"attention is eager; at {subject.length} tokens {words}")]
