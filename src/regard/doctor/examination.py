"""Examine a running model: perturb its inputs, and compare outputs that must be, or must not be, the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigurationError
from .examination_report import Examination, ModelFinding
from .formula_checks import check_finite_masks, check_precision, check_rotary, check_scale, check_sums
from .leaks import check_batch, check_documents, check_future, check_padding, check_positions, check_source
from .path_checks import (
    check_backends,
    check_cache,
    check_eager,
    check_options,
    check_random,
    check_state,
    check_training,
    with_attention,
)
from .reach_checks import check_mixing, check_window
from .rounding_noise import Noise, measure_noise
from .subject import InputNames, SkippedCheck, Subject, evaluating
from .weight_checks import check_heads, check_rows, check_sparse

OF_OTHER_SHAPES = {"padding", "source", "positions", "cache", "backends", "training", "options"}
"""Checks that compare inputs of several shapes, or several kernels."""
OF_ATTENTION = {"random", "future", "documents", "padding", "source", "batch", "rows", "cache", "training"}
"""Checks that run again after `regard.huggingface.swap`, where they found something."""
CheckFunction = Callable[[Subject, Noise], list[ModelFinding]]
FindingsOfChecks = dict[str, list[ModelFinding]]


_FUNCTIONS: dict[str, CheckFunction] = {
    "random": check_random,
    "future": check_future,
    "documents": check_documents,
    "padding": check_padding,
    "source": check_source,
    "positions": check_positions,
    "batch": check_batch,
    "rows": check_rows,
    "heads": check_heads,
    "scale": check_scale,
    "sums": check_sums,
    "rotary": check_rotary,
    "masks": check_finite_masks,
    "precision": check_precision,
    "window": check_window,
    "mixing": check_mixing,
    "cache": check_cache,
    "backends": check_backends,
    "training": check_training,
    "options": check_options,
    "state": check_state,
    "sparse": check_sparse,
    "eager": check_eager,
}
CHECKS = tuple(_FUNCTIONS)
"""Names of all checks."""


def examine(
    model: nn.Module,
    batch: Any,
    *,
    causal: bool | None = None,
    packed: bool | None = None,
    sequence: str | int | None = None,
    vocabulary: int | None = None,
    padding: str | Callable[[Tensor], Mapping[str, Any] | None] | None = None,
    pad_token: int | None = None,
    cache: str | None = None,
    predicts_own: bool = False,
    checks: Iterable[str] = CHECKS,
    maps: bool = False,
) -> Examination:
    """Change the inputs of a model and compare its outputs: leaks, padding, caches, backends, heads.

    An output y_t of a causal model must not move when tokens after t change, of any model when masked padding, another
    row of the batch or another document does; it must move with the order of the tokens. Parts with a cache,
    evaluation and training without dropout, and all backends must agree. The model runs in evaluation, in float64
    where it can, on a copy where it is changed; its mode and parameters are as before afterwards. Differences count
    from what rounding makes in this model (`Noise`): the same input twice, rows in another order, float32 for float64.

    Args:
        model: a torch module, of transformers or not, batch first.
        batch: what the model takes: a tensor, a tuple of arguments or a mapping of keywords. Token ids (batch, length)
            or embeddings (batch, length, ...); 64 positions or more let every check see something. Outputs are those
            of positions (batch, length, ...) or of rows (batch, ...), as of a classifier.
        causal: whether outputs may depend on earlier positions alone. None: true for decoders of transformers; for
            others only leaks at some positions are reported, not those of an encoder.
        packed: whether to check packed documents. None: where positions in the batch start again, or the model takes
            document ids.
        sequence: name or index of the input whose positions are those of the outputs; found by its shape without it.
        vocabulary: token ids are below it; measured from the embedding without it.
        padding: name of the argument that is True or 1 at tokens and False or 0 at padding; or a function from such a
            mask (batch, length), bool, to keywords, as `lambda keep: {"mask": ~keep}`, that returns None where they
            cannot say it, as lengths padding on the left. None: the argument is recognized by its name.
        pad_token: token id of padding, for models that find it in the sequence.
        cache: name of the argument that takes the cache; None: recognized by its name. Objects in the batch that a
            model changes, such as caches, are copied for each call.
        predicts_own: whether an output predicts the token of its own position, and must not depend on it.
        checks: names from `regard.doctor.CHECKS`.
        maps: whether findings have the maps that show them, for `examination_page`: of a leak the influence of each
            token on each output, which takes a run of the model for each token, and weights of heads.

    Raises:
        ConfigurationError: the model does not run on the batch, has no output for each position, or a check is
            unknown.

    >>> import torch, regard.doctor
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> found = regard.doctor.examine(layer, torch.randn(2, 20, 8), causal=True, checks=["future"])
    >>> [(one.code, one.name, one.evidence.moved is not None) for one in found.findings]
    [('RUN101', 'future leak', True)]
    """
    wanted = (checks,) if isinstance(checks, str) else tuple(checks)
    unknown = [name for name in wanted if name not in CHECKS]
    if unknown:
        raise ConfigurationError(f"there is no check {unknown[0]!r}: {', '.join(CHECKS)}")
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    with evaluating(model):
        names = InputNames(sequence, vocabulary, padding, pad_token, cache, predicts_own)
        original = Subject(model, batch, names)
        if original.length < 2:
            raise ConfigurationError(f"the sequence has {original.length} position; two or more can be examined")
        original.maps, original.packed = maps, packed
        original.causal = _is_causal(model) if causal is None else causal
        subject = original.in_double()
        subject.model.eval()
        noise = measure_noise(subject, original)
        findings, skipped = _run(subject, noise, wanted)
        findings = _try_swap(subject, noise, findings)
    ordered = sorted((one for found in findings.values() for one in found), key=lambda found: found.code)
    return Examination(type(model).__name__, tuple(ordered), tuple(findings), skipped, asdict(noise))


def _is_causal(model: nn.Module) -> bool | None:
    """What transformers says of its own models; None for others, and where a configuration says that it is not."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return None
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        return True
    stated = (getattr(config, "is_decoder", None), getattr(config, "causal", None))
    if False in stated or getattr(config, "attn_type", None) == "bi":  # BERT, XLM and XLNet, which may be either
        return None
    words = ("ForCausalLM", "LMHead", "ForConditionalGeneration", "Decoder")
    return True if any(word in type(model).__name__ for word in words) else None


def _run(subject: Subject, noise: Noise, wanted: Collection[str]) -> tuple[FindingsOfChecks, dict[str, str]]:
    """The findings of each check that ran, and why others did not."""
    findings: FindingsOfChecks = {}
    skipped: dict[str, str] = {}
    own = subject.original or subject
    is_nan = bool(subject.outputs().isnan().any(-1).all()) and bool(own.outputs().isnan().any(-1).all())
    for name, check in _FUNCTIONS.items():
        if name not in wanted:
            continue
        if noise.is_random and name in OF_OTHER_SHAPES:
            skipped[name] = "evaluation is random, and draws other numbers for inputs of another shape"
            continue
        if is_nan and name != "rows":
            skipped[name] = "all outputs are NaN"
            continue
        try:
            findings[name] = _in_own_dtype(check, subject, noise)
        except SkippedCheck as reason:
            skipped[name] = str(reason)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:160]
            skipped[name] = f"the model raises {type(error).__name__}: {first}"
    return findings, skipped


def _in_own_dtype(check: CheckFunction, subject: Subject, noise: Noise) -> list[ModelFinding]:
    """The findings of a check; in the model's own dtype where outputs in float64 are NaN.

    A mask of the smallest number of float64 is -inf in a softmax of float32, as models of transformers have.
    """
    subject.nan_outputs.clear()
    found = check(subject, noise)
    if subject.nan_outputs and subject.original is not None:
        return check(subject.original, measure_noise(subject.original, subject.original))
    return found


def _try_swap(subject: Subject, noise: Noise, findings: FindingsOfChecks) -> FindingsOfChecks:
    """The findings of a model of transformers, with what `regard.huggingface.swap` changes."""
    names = OF_ATTENTION & {name for name, found in findings.items() if found}
    if not names or not subject.is_huggingface:
        return findings
    try:
        other = with_attention(subject, "regard")
        other.outputs()  # regard refuses what it does not know when it is called: keys selected by an indexer
    except Exception:
        return findings
    other.maps = False
    again, _ = _run(other, noise, names)
    still = {(name, one.code) for name, found in again.items() for one in found}
    return {
        name: [replace(one, mended_by_swap=(name, one.code) not in still) if name in again else one for one in found]
        for name, found in findings.items()
    }
