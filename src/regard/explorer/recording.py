"""Record every attention call of a model while it runs; detect the roles of the recorded heads."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import Lock
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.problem import Problem
from ..errors import AtlasError, ConfigurationError
from ..kernels.hooks import attention_hook, current_hook
from ..linear.linear_weights import is_exact_twin, reporting_exact_attention
from ..utils.call_site import ELSEWHERE, CallSite, find_call_site
from .atlas import Atlas
from .atlas.atlas_file import check_title
from .atlas.captured_call import CapturedCall, TensorSnapshots, capture, is_causal
from .atlas.records import records_from_calls
from .atlas.role_detection import detect_map_roles
from .atlas.tokenized_text import TokenizedText
from .decode_steps import ForwardPasses, merge_steps
from .recorded_norms import ValueNorms
from .torch_recorder import TorchLayerRecorder

Tokens = Sequence[Any] | Mapping[str, Any] | TokenizedText
EXACT = " (exact)"
"""What follows a module's name in the name of the exact attention on the queries and keys of its linear attention."""
_named_call: ContextVar[tuple[str, str] | None] = ContextVar("within", default=None)
"""The name and kind of what is heard, where it comes from no module of the model."""


class Recording:
    """The calls that `record` has captured so far; `atlas` converts them."""

    def __init__(self, model: nn.Module, *, dtype: Literal["float16", "keep"] = "float16") -> None:
        self.model, self.dtype = model, dtype
        self.calls: list[CapturedCall] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._numbers: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._snapshots = TensorSnapshots()
        self._passes = ForwardPasses()
        self._norms = ValueNorms(model)
        self._layers = TorchLayerRecorder(
            self._names, recording_as=_named, is_active=self._is_active, on_model_end=self._on_model_end
        )
        self._lock = Lock()  # more than one thread may run in the context of the block

    def on_attention(self, problem: Problem, lse: Tensor) -> None:
        """Capture one call; calls from outside the model, or without pairs, are ignored."""
        within, with_cache = _named_call.get(), False
        if within is not None:
            name, kind = within[0], (within[1], False)
        else:
            site = find_call_site(self._names)
            name, with_cache = site.name, site.with_cache
            kind = attention_kind(problem, site) if name else ("self", True)
            name += EXACT if name and is_exact_twin() else ""
        if not name or not problem.weights_shape.numel():
            return
        with self._lock:
            call = capture(
                problem,
                lse,
                name=name,
                number=self._numbers[name],
                kind=kind,
                snapshots=self._snapshots,
                half=self.dtype == "float16",
                norms=self._norms.of_call(problem, name.removesuffix(EXACT)),
            )
            self._keep(call, with_cache)

    def _keep(self, call: CapturedCall, with_cache: bool) -> None:
        """Store a call, merged into the one that it continues: else each decode step would store its whole cache."""
        self._numbers[call.name] += 1
        last = self._last.get(call.name)
        continues = self._passes.continues(call, with_cache=with_cache)
        more = merge_steps(self.calls[last], call) if last is not None and continues else None
        if last is not None and more is not None:
            self.calls[last] = more
            return
        self._last[call.name] = len(self.calls)
        self.calls.append(call)

    def atlas(self, *, tokens: Tokens | None = None, title: str = "") -> Atlas:
        """Convert the captured calls to an atlas: one map for each attention module, call, and sequence of the batch.

        Calls of one module that are rows of one map become one: the steps of a decoder on a cache that only grew, or
        over one source. Others stay calls of their own, in their order, with the positions that they had: those of a
        cache that drops keys, and of a beam whose hypotheses change places, where a sequence is a place in the beam.

        Args:
            tokens: the tokens of each position, as a list of str, or as `TokenizedText`, which also says which tokens
                form which word. One list serves all sequences of the batch; a list of lists has one for each sequence.
                A pair (queries, keys) of these is for cross-attention; self-attention then takes the list whose length
                fits, the keys' in modules called "encoder". A mapping has any of these by the names of modules, or by
                beginnings of names. A generated text may have one token more than there are keys: its last token was
                never a query.
                A pair of two different lists of the same length marks a map as cross-attention where the recording
                could only guess its kind, and wherever a mapping gives the pair under the full name of the module.
            title: what the atlas is called.

        Where tokens are given, heads of self-attention have the `roles` of `regard.heads.text_roles` that they meet; of
        long texts some 512 rows are looked at, in strips all along them.

        Warns:
            UserWarning: some layers of torch's could not be heard; which, and why.

        Raises:
            AtlasError: nothing was caught; tokens do not fit; a mask or a bias that an atlas cannot hold.
        """
        check_title(title)
        missed = self._missed()
        if not self.calls:
            raise AtlasError(_nothing_caught(self.model) + (f". Not heard: {missed}" if missed else ""))
        if missed:
            warnings.warn(f"the atlas has not all of the model's attention. Not heard: {missed}", stacklevel=2)
        order = {name: at for at, name in enumerate(self._numbers)}
        calls = sorted(self.calls, key=lambda call: order[call.name])
        records, arrays = records_from_calls(calls, [tokens] * len(calls))
        return Atlas(records, arrays, title)

    def _missed(self) -> str:
        """Names of the torch layers that were called but could not be recorded, and why."""
        heard = {*self._numbers}
        missed = [
            f"{name!r}, {why}"
            for name, why in self._layers.missed.items()
            if not heard & {name, name.rpartition(".")[0]}
        ]
        return "; ".join(missed[:5]) + " …" * (len(missed) > 5)

    def _is_active(self) -> bool:
        return current_hook() == self.on_attention

    def _on_model_end(self) -> None:
        self._passes.ended += 1


@contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    """Record the calls captured in the block under this module name and kind."""
    token = _named_call.set((name, kind))
    try:
        yield
    finally:
        _named_call.reset(token)


@contextmanager
def record(
    model: nn.Module, *, dtype: Literal["float16", "keep"] = "float16", exact: bool = False
) -> Iterator[Recording]:
    """Record every attention call of a model in the block; the model's results do not change by a bit.

    Caught are `regard.attention` and all that calls it: our models and layers, models of transformers with
    `attn_implementation="regard"` (`regard.huggingface.swap` chooses it); and `torch.nn.MultiheadAttention`, by its
    inputs: its attention is computed a second time, with the rounding of ours, whichever path torch takes itself.
    Kept are queries, keys and log-sum-exp: memory grows with the lengths, not with their product.

    The block's own thread is listened to, and what runs in its context, as `asyncio.to_thread` does: a model called in
    another thread is not heard, nor is what a record within this one hears. Subclasses of torch's layers with a
    `forward` of their own are left out, since their inputs do not tell what they hand on; `Recording.atlas` names them.

    Args:
        model: the model, or the part of it, whose calls are caught; it may be called more than once.
        dtype: queries and keys are kept as "float16", or, with "keep", as they are. Of numbers too large for float16
            they are always kept as they are.
        exact: whether exact attention on the same queries and keys is computed and kept beside each linear attention,
            as a map of its own whose name ends with " (exact)".

    Of linear attention, features are kept, as they are; weights that are negative or do not sum to 1, and decoding
    steps, whose earlier keys are gone, are left out with a warning. Weights are those before dropout. Under
    torch.compile and torch.func nothing is caught.

    Raises:
        ConfigurationError: what is given is no `nn.Module`, or another dtype.

    >>> import torch, regard
    >>> from regard.explorer import record
    >>> layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal())
    >>> with record(torch.nn.Sequential(layer)) as recording:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> atlas = recording.atlas(tokens=["a", "b", "c"])
    >>> atlas.maps[0].name, atlas.maps[0].weights(0, slice(0, 2), slice(0, 3)).tolist()
    ('0', [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"record needs a model, a torch.nn.Module; this is a {type(model).__name__}")
    if dtype not in ("float16", "keep"):
        raise ConfigurationError(f"record keeps queries and keys as dtype 'float16' or 'keep'; it is {dtype!r}")
    recording = Recording(model, dtype=dtype)
    twins = reporting_exact_attention() if exact else nullcontext()
    with attention_hook(recording.on_attention), recording._layers.listening_to_calls(), twins:
        yield recording


def _nothing_caught(model: nn.Module) -> str:
    if dist.is_available() and dist.is_initialized() and dist.get_rank():
        return (
            "no attention was caught in this process: in ring.sharded the process of rank 0 records the whole sequence"
            "; call atlas there"
        )
    seen = sorted({type(module).__name__ for module in model.modules() if "attention" in type(module).__name__.lower()})
    has = (
        f"has {', '.join(seen[:5])}, but none of them" if seen else "has no module whose class is called an attention,"
    )
    return (
        f"no attention was caught: {type(model).__name__} {has} called regard.attention or was a "
        "torch.nn.MultiheadAttention while the block ran. Call the model inside the block, not compiled; choose "
        "regard.huggingface.swap(model) for a model of transformers; elsewhere let it call "
        "regard.scaled_dot_product_attention"
    )


def with_detected_roles(atlas: Atlas) -> Atlas:
    """A copy of an atlas with the roles of its self-attention heads, detected on its own weights.

    The rules are those of `regard.heads.text_roles`, each with its score and how many rows were counted. Maps that have
    been told roles, as a record does where it is given tokens, keep what they have; so do those of cross-attention, and
    those whose queries are not the last of the keys. Of long texts some 512 rows are looked at, in strips all along
    them. Memory is linear in the lengths, of `Atlas.from_weights` that of one head's weights.

    >>> import torch
    >>> weights = torch.eye(40)[torch.arange(40).sub(1).clamp(min=0)]
    >>> found = with_detected_roles(Atlas.from_weights({"head": weights[None]}, tokens=[str(i) for i in range(40)]))
    >>> [role["name"] for role in found.maps[0].roles[0]]
    ['previous token']
    """
    roles = [None if of.record.get("roles") else detect_map_roles(of) for of in atlas.maps]
    return atlas.with_roles([of.roles if found is None else found for of, found in zip(atlas.maps, roles, strict=True)])


def attention_kind(problem: Problem, site: CallSite) -> tuple[str, bool]:
    """Classify a call as "self" or "cross" attention; also return whether that is a guess.

    A module's method says so by the names of its arguments. Where it does not, more queries than keys are "cross", and
    so are fewer without a cache, but for a single one and for rows that look back: these may go on from keys that were
    kept. All else is "self", a guess where the method was given two sequences.
    """
    variables = site.variables
    if site.is_cross:
        return "cross", False
    if isinstance(variables.get("self"), nn.MultiheadAttention):
        return "self", False
    if problem.queries > problem.keys:
        return "cross", False
    if site.with_cache or any(name in variables for name in ELSEWHERE):
        return "self", False
    if problem.queries < problem.keys and not is_causal(problem):
        return "cross", False
    return "self", _are_two(site.arguments, problem)


def _are_two(arguments: tuple[Any, ...], problem: Problem) -> bool:
    """Whether the arguments have two different sequences, (..., M or N, dim), of the same number of axes."""
    lengths = problem.queries, problem.keys
    given = [of for of in arguments if isinstance(of, Tensor) and of.is_floating_point() and of.ndim > 1]
    given = [of for of in given if of.ndim == given[0].ndim and of.shape[-2] in lengths]
    return any(of is not given[0] and not _equal(of, given[0]) for of in given[1:])


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.device == right.device and torch.equal(left, right)
