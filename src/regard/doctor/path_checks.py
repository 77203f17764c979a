"""Checks that compute the same in two ways: with and without a cache, by other backends, in training and evaluation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .examination_report import ModelFinding, finding
from .finding import Severity
from .leaks import SkippedCheck
from .softmax_capture import capture_weights
from .subject import CACHES, Noise, Subject, largest, position_outputs

CHUNK = 5
"""Tokens of a chunk."""


def _cached_steps(subject: Subject, sizes: Sequence[int], name: str) -> tuple[Tensor, int]:
    """Outputs of the sequence in parts of these sizes, each after the cache of the last, and how many there are."""
    cache, parts, start = None, [], 0
    keywords: dict[str, Any] = {"use_cache": True} if "use_cache" in subject.parameters else {}
    if "attention_mask" in subject.keywords and str(subject.key) == "input_ids":
        keywords["attention_mask"] = None
    for size in sizes:
        part = subject.sequence[:, start : start + size]
        if part.shape[1] == 0:
            break
        output = subject.run(part, **keywords, **({} if cache is None else {name: cache}))
        parts.append(position_outputs(output))
        cache = _cache_in(output)
        if cache is None:
            raise SkippedCheck("the model returns no cache")
        start += size
    return torch.cat(parts, dim=1), start


def _cache_in(output: Any) -> Any:
    for name in CACHES:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if value is not None:
            return value
    return output[1] if isinstance(output, tuple) and len(output) == 2 else None


def check_cache(subject: Subject, noise: Noise, causal: bool | None) -> list[ModelFinding]:
    """RUN120: the sequence in chunks, and token by token, with a cache, has other outputs than at once."""
    name = subject.argument(CACHES)
    if name is None:
        raise SkippedCheck(f"the model takes no cache ({', '.join(CACHES)})")
    if causal is False:
        raise SkippedCheck("the model is bidirectional")
    mask: dict[str, Any] = {"attention_mask": None} if str(subject.key) == "input_ids" else {}
    whole = subject.outputs(**mask)
    length, found = subject.length, []
    chunks = [CHUNK] * (length // CHUNK + 1)
    steps = [length // 2] + [1] * (length - length // 2)
    for words, sizes in ((f"chunks of {CHUNK} tokens", chunks), ("single tokens after half of it", steps)):
        try:
            outputs, _ = _cached_steps(subject, sizes, name)
        except SkippedCheck:
            raise
        except Exception as error:
            message = f"{words} with a cache raise {type(error).__name__}: {str(error)[:120]}"
            found.append(finding("RUN120", message, severity=Severity.WARNING))
            continue
        difference = (outputs - whole).abs().nan_to_num(nan=torch.inf)
        moves = difference.amax((0, 2))
        if float(moves.max()) > noise.other_shape:
            first = int((moves > noise.other_shape).nonzero()[0])
            message = f"{words} with a cache give other outputs than the sequence at once, from position {first} on"
            found.append(finding("RUN120", message, moved=first, by=float(moves.max()), tolerance=noise.other_shape))
    return found


def _select(model: Any, implementation: str) -> None:
    """Select an attention implementation of a model of transformers."""
    model.set_attn_implementation(implementation)


def _implementations(subject: Subject) -> dict[str, Tensor | str]:
    """Outputs by each attention implementation that the model can select, or why not."""
    results: dict[str, Tensor | str] = {}
    for name in ("eager", "sdpa", "regard"):
        other = subject.copied()
        try:
            if name == "regard":
                other = swapped(subject)
            else:
                _select(other.model, name)
            results[name] = other.outputs()
        except SkippedCheck as error:
            results[name] = str(error)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error)[:120]}"
    return results


def swapped(subject: Subject) -> Subject:
    """A copy of a model of transformers whose attention is regard's.

    Raises:
        SkippedCheck: none of its attentions can be selected.
    """
    from ..huggingface import swap

    other = subject.copied()
    if not swap(other.model).replaced:
        raise SkippedCheck("no attention of the model can be selected")
    return other


def check_backends(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN121: eager attention, torch's SDPA and regard give different outputs."""
    if not subject.is_huggingface:
        raise SkippedCheck("no model of transformers, whose attention can be selected")
    results = _implementations(subject)
    outputs = {name: value for name, value in results.items() if isinstance(value, Tensor)}
    if "eager" not in outputs or len(outputs) < 2:
        raise SkippedCheck("; ".join(f"{name}: {value}" for name, value in results.items() if isinstance(value, str)))
    found = []
    for name, value in outputs.items():
        difference = (value - outputs["eager"]).abs().nan_to_num(nan=torch.inf).amax((0, 2))
        if float(difference.max()) > noise.other_shape:
            message = f"attn_implementation={name!r} gives other outputs than 'eager'"
            evidence = {"moved": int(difference.argmax()), "by": float(difference.max())}
            found.append(finding("RUN121", message, tolerance=noise.other_shape, **evidence))
    return found


def _without_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0: modules, and attributes with dropout or drop_path in their name."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name, value in list(vars(config).items()) if config is not None and hasattr(config, "__dict__") else ():
        if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            setattr(config, name, 0.0)


def _train(model: nn.Module) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # statistics of the batch are meant


def check_training(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN122: without dropout, training computes other outputs than evaluation."""
    other = subject.copied()
    _without_dropout(other.model)
    expected = other.outputs()
    _train(other.model)
    try:
        first, second = other.outputs(seed=0), other.outputs(seed=1)
    except Exception as error:
        raise SkippedCheck(f"does not run in training: {type(error).__name__}: {str(error)[:120]}") from error
    if largest(first - second) > noise.same_shape:
        raise SkippedCheck("training is random though every dropout is 0")
    if first.shape != expected.shape:
        raise SkippedCheck("training returns another shape")
    difference = (first - expected).abs().nan_to_num(nan=torch.inf).amax((0, 2))
    if float(difference.max()) <= noise.other_shape:
        return []
    evidence = {"moved": int(difference.argmax()), "by": float(difference.max()), "tolerance": noise.other_shape}
    return [finding("RUN122", "with every dropout 0, train() gives other outputs than eval()", **evidence)]


def check_random(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN123: evaluation depends on the random seed, as with a dropout that is active."""
    if not noise.is_random:
        return []
    difference = (subject.outputs(seed=1) - subject.outputs(seed=0)).abs().nan_to_num().amax((0, 2))
    message = "eval() gives other outputs with another random seed: a dropout is active"
    return [finding("RUN123", message, moved=int(difference.argmax()), by=noise.seeds)]


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
            other = swapped(subject) if name == "regard" else subject.copied()
            if name == "sdpa":
                _select(other.model, name)
            eager, seconds = _seconds([subject, other])
        except Exception:
            continue
        if seconds < eager:
            faster.append(f"{name} takes {seconds / eager:.2f} of its time")
    if not faster:
        return []
    words = " and ".join(faster)
    return [finding("RUN131", f"attention is eager; at {subject.length} tokens {words}")]
