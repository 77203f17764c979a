"""One token of the linear recurrence: its output, and the state after it, written or as the tokens that it lacks.

The structure is explained in recurrence.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.recurrence_problem import FeatureMapName, RecurrenceProblem
from ...errors import ConfigurationError
from . import library
from .flash_tiles import RowsStruct
from .library import last_contiguous
from .threads import run_jobs, split_range, team_address, thread_count

STEP_FEATURE_MAPS = ("identity", "elu", "unit_norm")  # recurrence.h has the same, in this order

LEAST_STATE = 2**17
"""Entries of the state that a step of one token has for each thread: some 20 microseconds."""

INVALID, FAILED = 1, 2
"""What the C function returns; 0 for success."""

Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""The shape, the strides and the dtype of a tensor."""


class RecurrenceStepStruct(ctypes.Structure):
    """The structure `recurrence_step` of recurrence.h."""

    _fields_ = (
        *((name, c_int64) for name in ("first_unit", "unit_end", "heads", "group", "dim", "value_dim")),
        *((name, c_int64) for name in ("recent_capacity", "decay_kind", "feature_map", "normalize")),
        ("scale", c_float),
        *((name, RowsStruct) for name in ("query", "key", "value", "decay", "beta", "removal")),
        *((name, c_int64) for name in ("dtype", "decay_dtype", "beta_dtype", "recent_count", "invalid")),
        *((name, c_void_p) for name in ("state", "recent", "output", "final_state")),
    )


class TokenStepInC:
    """The recurrence of one token for tensors of one layout on the CPU: `prepare_step` makes it.

    What shapes, strides and dtypes decide is computed once, so that a token is one call of C code.

    Shapes: query (B, H, 1, D), key (B, Hk, 1, D), value (B, Hk, 1, Dv); output_shape is (B, H, 1, Dv), and state_shape
    (B, Hk, D · Dv), or (B, Hk, D · Dv + D) with the total after the matrix where normalised.
    """

    def __init__(
        self,
        query: Layout,
        key: Layout,
        value: Layout,
        decay: Layout | None,
        beta: Layout | None,
        removal: Layout | None,
        feature_map: FeatureMapName,
        normalize: bool,
        scale: float,
        recent_share: float,
    ) -> None:
        self._arguments = query, key, value, decay, beta, removal, feature_map, normalize, scale, recent_share
        (batch, heads, _, self.dim), self.value_dim = query[0], value[0][3]
        key_heads, self.dtype = key[0][1], query[2]
        self.feature_map: FeatureMapName = feature_map
        self.normalize, self.scale = normalize, scale
        self.output_shape = torch.Size((batch, heads, 1, self.value_dim))
        self.state_shape = torch.Size((batch, key_heads, self.dim * (self.value_dim + normalize)))
        self.decay_dim = 0 if decay is None else 1 if len(decay[0]) == 3 else self.dim
        self.recent_width = self.dim + self.value_dim + self.decay_dim
        """Numbers that are stored of a token: its φ(k), its u, and the factor of its decay."""
        self.recent_capacity = int(recent_share * self.dim * self.value_dim / max(self.recent_width, 1))
        contiguous = torch.empty(query[0], device="meta").stride()
        self._output_is_like_query = query[:2] == (self.output_shape, contiguous)
        """Whether torch makes the output faster, in the shape and the strides of the query."""
        self._units = batch * key_heads if heads else 0
        self._entries = self.state_shape.numel()
        self._struct = RecurrenceStepStruct(
            unit_end=self._units,
            heads=heads,
            group=heads // max(key_heads, 1),
            dim=self.dim,
            value_dim=self.value_dim,
            recent_capacity=self.recent_capacity,
            decay_kind=0 if decay is None else len(decay[0]) - 2,
            feature_map=STEP_FEATURE_MAPS.index(feature_map),
            normalize=normalize,
            scale=scale,
            query=_first_row(query),
            key=_first_row(key),
            value=_first_row(value),
            decay=_first_row(decay),
            beta=_first_row(beta),
            removal=_first_row(removal),
            dtype=library.DTYPES.index(self.dtype),
            decay_dtype=0 if decay is None else library.DTYPES.index(decay[2]),
            beta_dtype=0 if beta is None else library.DTYPES.index(beta[2]),
        )
        self._address = ctypes.addressof(self._struct)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStepInC, self._arguments

    def takes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        removal: Tensor | None = None,
    ) -> bool:
        """Whether tensors are on the CPU and have the layout; of what it has no gate of, there has to be none.

        A step that was loaded where there is no native code takes nothing.
        """
        layouts = self._arguments
        return (
            library.available()
            and query.is_cpu
            and key.is_cpu
            and value.is_cpu
            and layout_of(query) == layouts[0]
            and layout_of(key) == layouts[1]
            and layout_of(value) == layouts[2]
            and (layouts[3] is None if decay is None else decay.is_cpu and layout_of(decay) == layouts[3])
            and (layouts[4] is None if beta is None else beta.is_cpu and layout_of(beta) == layouts[4])
            and (layouts[5] is None if removal is None else removal.is_cpu and layout_of(removal) == layouts[5])
        )

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        recent: Tensor | None = None,
        recent_count: int = 0,
        target: Tensor | None = None,
        removal: Tensor | None = None,
    ) -> Tensor:
        """The output. Without `recent`, `target` gets the new state.

        With it, the token is appended to `recent`, in place. Where there is a target too, the tokens before are first
        added to the state, which `target`, perhaps the same memory, gets; the token is then the first of `recent`.

        Nothing is checked: the caller knows that it `takes` the tensors.

        Shapes: state and target as `state_shape`; recent (B, Hk, `recent_capacity`, `recent_width`), of which the first
        `recent_count` are tokens that the state lacks, each φ(k), u and the factor of its decay. All are float32 and
        contiguous.

        Raises:
            KernelError: there is no native code to call (`regard.native.why_not`).
            ConfigurationError: a decay above 0, or a beta not within 0..2.
            MemoryError: nothing was written.
        """
        output = torch.empty_like(query) if self._output_is_like_query else query.new_empty(self.output_shape)
        arguments = (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if decay is None else decay.data_ptr(),
            None if beta is None else beta.data_ptr(),
            None if removal is None else removal.data_ptr(),
            state.data_ptr(),
            None if recent is None else recent.data_ptr(),
            recent_count,
            output.data_ptr(),
            None if target is None else target.data_ptr(),
        )
        function = library.current().recurrence_step
        if self._entries < 2 * LEAST_STATE:
            failure = function(self._address, None, 1, *arguments)
        else:
            failure = self._run_on_threads(function, arguments)
        if failure == INVALID:
            raise ConfigurationError("a decay is above 0, or a beta is not within 0..2")
        if failure == FAILED:
            raise MemoryError("native code found no memory for the rows of a token")
        return output

    def in_one_call(self) -> bool:
        """Whether `run` calls C once, so that it fails before anything is written or not at all."""
        return self._entries < 2 * LEAST_STATE or torch.get_num_threads() == 1 or team_address() is not None

    def _run_on_threads(self, function: Callable[..., int], arguments: Sequence[int | None]) -> int:
        """Call C for as many threads as the state is worth; what it returns."""
        count, team = min(thread_count(self._entries, LEAST_STATE), self._units), team_address()
        if count <= 1 or team is not None:
            return function(self._address, team if count > 1 else None, torch.get_num_threads(), *arguments)
        failures = [0]

        def run(_: int, part: RecurrenceStepStruct) -> None:
            failures.append(function(ctypes.addressof(part), None, 1, *arguments))

        parts = []
        for begin, end in split_range(0, self._units, count):
            part = RecurrenceStepStruct.from_buffer_copy(self._struct)
            part.first_unit, part.unit_end = begin, end
            parts.append(part)
        run_jobs(run, parts, count)
        return max(failures)


def layout_of(tensor: Tensor) -> Layout:
    """The shape, the strides and the dtype of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype


def prepare_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    removal: Tensor | None = None,
    *,
    feature_map: FeatureMapName = "identity",
    normalize: bool = False,
    scale: float = 1.0,
    recent_share: float = 0.0,
) -> TokenStepInC | None:
    """The step for tensors of these layouts; None where there is no code for them.

    There is for tensors on the CPU, query, key and value of one dtype of `library.DTYPES`, and the gates of any of
    them. The last axes of query, key, value and of a decay per feature have to be contiguous.

    Args:
        query: (B, H, 1, D).
        key: (B, Hk, 1, D).
        value: (B, Hk, 1, Dv).
        decay: (B or 1, Hk, 1) or (B or 1, Hk, 1, D), at most 0.
        beta: (B, Hk, 1), within 0..2.
        removal: (B, Hk, 1, D), of the dtype of the key and without a feature map, the key whose value the delta rule
            removes where it is another one; it needs a beta.
        feature_map: of queries times `scale`, and of keys: one of `STEP_FEATURE_MAPS`.
        normalize: whether outputs are divided by their totals; a row whose total is 0 is 0.
        scale: of queries.
        recent_share: the most that recent tokens may take, as a share of the state.
    """
    tensors = query, key, value, decay, beta, removal
    known = all(tensor is None or (tensor.is_cpu and tensor.dtype in library.DTYPES) for tensor in tensors)
    if not (known and query.dtype is key.dtype is value.dtype and library.available()):
        return None
    if removal is not None and (removal.dtype is not key.dtype or removal.stride(-1) != 1 or beta is None):
        return None
    layouts = tuple(None if tensor is None else layout_of(tensor) for tensor in tensors)
    return _prepare(*layouts, feature_map, normalize, scale, recent_share)


def one_token(problem: RecurrenceProblem) -> tuple[Tensor, Tensor] | None:
    """The recurrence of one token after a state, unnormalised and without a feature map: its output, and the new state.

    None where the problem is another one, or a tensor does not fit. Computed without autograd. The state is read and
    written once.

    Raises:
        ConfigurationError: a decay above 0, or a beta not within 0..2.
    """
    state = problem.state
    if state is None or problem.normalize or problem.feature_map != "identity":
        return None
    query, key, value = (last_contiguous(tensor) for tensor in (problem.query, problem.key, problem.value))
    decay, beta = problem.decay, problem.beta
    decay = None if decay is None else last_contiguous(decay)
    removal = None if problem.removal is None else last_contiguous(problem.removal)
    step = prepare_step(query, key, value, decay, beta, removal)
    if step is None or state.dtype is not torch.float32 or not state.is_cpu:
        return None
    if state.shape != (*key.shape[:2], step.dim, step.value_dim):
        return None
    new_state = torch.empty_like(state, memory_format=torch.contiguous_format)
    output = step.run(query, key, value, decay, beta, state.contiguous(), target=new_state, removal=removal)
    return output, new_state


@lru_cache(maxsize=256)  # the same shapes come at every step
def _prepare(
    query: Layout,
    key: Layout,
    value: Layout,
    decay: Layout | None,
    beta: Layout | None,
    removal: Layout | None,
    *options: Any,
) -> TokenStepInC | None:
    """The step for layouts; None where there is none."""
    gates = None if decay is None else decay[0], None if beta is None else beta[0]
    fits = _fits(query[0], key[0], value[0], *gates) and (removal is None or removal[0] == key[0])
    return TokenStepInC(query, key, value, decay, beta, removal, *options) if fits else None


def _fits(
    query: torch.Size, key: torch.Size, value: torch.Size, decay: torch.Size | None, beta: torch.Size | None
) -> bool:
    """Whether these are shapes of the arguments of `prepare_step`."""
    if not len(query) == len(key) == len(value) == 4:
        return False
    leading, dim = key[:3], key[3]
    return (
        query[2] == key[2] == 1
        and (query[0], query[3]) == (key[0], dim)
        and value[:3] == leading
        and query[1] % max(key[1], 1) == 0
        and (decay is None or (decay[0] in (1, key[0]) and decay[1:] in (leading[1:], key[1:])))
        and (beta is None or beta == leading)
    )


def _first_row(layout: Layout | None) -> RowsStruct:
    """The strides of the rows of a tensor (B, heads, 1, ...); a batch of 1 serves all."""
    if layout is None:
        return RowsStruct(None, 0, 0, 0)
    shape, strides, _ = layout
    return RowsStruct(None, strides[0] if shape[0] > 1 else 0, strides[1], 0)
