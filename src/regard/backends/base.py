"""The protocol of backends: groups of methods that kernels call, each optional, and reasons against a problem.

A kernel of `regard.kernels` says what is computed; a backend computes it, for tensors of the devices and dtypes that it
knows. A group that a backend does not have is None. Problems come as `BatchedProblem`: query (B, H, M, D), key
(B, Hk, N, D) and value (B, Hk, N, Dv), where Hk divides H, with mask, bias, softcap and dropout. Log-sum-exps are
(B, H, M), float32 at least, -inf of rows that attend to nothing. Nothing here sees autograd: `kernels.custom_op` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Size, Tensor, dtype

from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..core.recurrence_problem import (
    FeatureMapName,
    RecurrenceGradients,
    RecurrenceInputs,
    RecurrenceProblem,
    RecurrenceResult,
    StoredRecurrence,
)
from ..core.row_weights import RowWeights
from ..core.score_forms import AdditivePairs
from ..lenses.forms import WeightForm
from ..tiles.key_lists import KeyLists, ListGradients, ListTerms
from ..tiles.pair_terms import PairTerms

Rows: TypeAlias = tuple[Tensor, Tensor]
"""Output (B, H, M, Dv) and log-sum-exp (B, H, M); `core.finite.CheckedRows` if they need no check for NaN."""


class FlashTiles(Protocol):
    """Attention over the tiles that a mask leaves, with the online softmax: no weights in memory.

    normalizers: the classes of those that it computes beside softmax, with the gradients of their parameters.
    """

    normalizers: tuple[type[Normalizer], ...]

    def why_not(self, problem: Problem) -> list[str]:
        """Reasons against a problem, by its score, mask and bias; never by the values of its tensors."""
        ...

    def forward(self, batched: BatchedProblem) -> Rows:
        """Output and log-sum-exp."""
        ...

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of query, key and value, and of a bias where `saved` asks for it."""
        ...

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write into output and log-sum-exp, or merge with those of other keys that stand there.

        Shapes: output (B, H, M, Dv) and lse (B, H, M), float32, of any strides but in the output's last axis. Returns
        whether what was written needs no check for NaN.
        """
        ...

    def backward_into(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients, *, accumulate: bool) -> bool:
        """Write the gradients, or add them to those that stand there; of the bias, always add.

        Those of query, key and value are float32, of any strides but in the last axis. Returns whether what was
        written into these three needs no check for NaN.
        """
        ...

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs that are computed for a problem: its price."""
        ...


class PreparedStep(Protocol):
    """One query of each head over a cache, for tensors of one layout: what that decides is computed once."""

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output (B, H, 1, Dv), in the dtype of the values; autograd sees nothing of it."""
        ...


class FewQueries(Protocol):
    """Few rows over many keys, each key read once for all rows: flash decoding.

    fused: whether scores are computed and used in one pass, without a tensor of them, and `limits` are read. most_rows:
    the most rows of a key head that this is the way for.
    """

    @property
    def fused(self) -> bool: ...

    @property
    def most_rows(self) -> int: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        added: Tensor | None = None,
        limits: Sequence[int] | None = None,
    ) -> Rows:
        """Softmax(scale · Q Kᵀ + added) · V, and its log-sum-exp.

        Shapes: query (B, Hk, R, D), R the rows of a key head; key (B, Hk, N, D), value (B, Hk, N, Dv); added (B or 1,
        Hk or 1, R, N), -inf where there is no pair. limits: of each query, R a multiple of them, the number of keys
        that it attends to, as under a causal mask.
        """
        ...

    def prepare_step(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> PreparedStep | None:
        """What computes one query of each head of such tensors; None where nothing is faster than `forward`.

        Shapes: query (B, H, 1, D), key (B, Hk, N, D), value (B, Hk, N, Dv). It serves every number of keys with the
        same power of two, and caches of other strides, as long as the last axes are contiguous where they are here.
        """
        ...


class TokenRuns(NamedTuple):
    """Neighbouring tokens of one sequence, and the keys that they attend to, as runs of rows in a memory.

    token: the first, of all tokens of a step. limit: how many of the keys it attends to, from the first on; each token
    after it attends to one more. runs: (first row, count).
    """

    token: int
    tokens: int
    limit: int
    runs: tuple[tuple[int, int], ...]

    @property
    def keys(self) -> int:
        """The keys of all runs."""
        return sum(count for _, count in self.runs)


class PagedKeys(Protocol):
    """A few tokens of each of many sequences over keys in one memory, read where they are.

    most_rows: the most tokens of a group times the query heads of a key head.
    """

    @property
    def most_rows(self) -> int: ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float, groups: Sequence[TokenRuns]) -> Rows:
        """Softmax(scale · Q Kᵀ) · V over the keys of each token, and its log-sum-exp.

        Shapes: query (H, T, D), the tokens of all sequences one after another; key (Hk, N, D), value (Hk, N, Dv).
        """
        ...


class ShortPass(Protocol):
    """Attention over few keys for tensors of one layout: what shapes, strides and dtypes decide is computed once.

    copies: whether an input's last axis is not contiguous; such inputs take `ShortRows.forward` and `backward`. spans,
    terms: as there.
    """

    @property
    def copies(self) -> bool: ...

    def forward(
        self, spans: Tensor | None, query: Tensor, key: Tensor, value: Tensor, terms: PairTerms | None = None
    ) -> tuple[Tensor, bool, bool] | None:
        """The output; None where a bias is too large for the code.

        Also whether all its entries are finite, and whether all log-sum-exps are small enough for float32
        (`log_sum_exp.LARGEST_LSE`), so that `backward` is exact.
        """
        ...

    def backward(
        self,
        spans: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        terms: PairTerms | None = None,
        *,
        of_bias: bool = False,
        of_sinks: bool = True,
    ) -> tuple[*ShortGradients, Tensor | None] | None:
        """The gradients, with the weights computed again; None where they are not finite or exact.

        Also that of the terms' sinks, (H,) float32, where there are any and it is asked for.
        """
        ...


ShortGradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of query, key and value in their shapes and dtypes, and of the terms' bias in float32 if it is asked for: (H or 1,
M + N - 1) of one by distance, else (B or 1, H, M, N), over all batches where the bias is the same for them.
`core.finite.CheckedGradients` if the first three need no check for NaN."""


class ShortRows(Protocol):
    """All scores of a row at once, of few keys: one pass forward and one backward.

    weights: of a normalizer that it `takes`; log-sum-exps are its numbers of rows. spans: (B or 1, M, 2) int32,
    contiguous: the first key that a row attends to, and the one after its last; all keys without it. terms: numbers
    added to the scores, pairs that are left out beside, and sinks, which log-sum-exps count and `backward` by these has
    none of. Rows that attend to nothing have output 0 and log-sum-exp -inf, or that of their sink.
    """

    @property
    def longest(self) -> int:
        """The most keys."""
        ...

    def takes(self, normalizer: Normalizer | None) -> bool:
        """Whether it computes a normalizer; None for softmax."""
        ...

    def prepare(
        self, weights: RowWeights, spans: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> ShortPass:
        """What computes such tensors; memoized by their layout."""
        ...

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: RowWeights,
        spans: Tensor | None = None,
        terms: PairTerms | None = None,
    ) -> Rows | None:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M); None where a bias is too large for the code."""
        ...

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: RowWeights,
        saved: Saved,
        spans: Tensor | None = None,
        terms: PairTerms | None = None,
    ) -> ShortGradients:
        """The gradients, and that of the terms' bias where `saved` asks for it."""
        ...

    def listed_pairs(
        self, indices: Tensor, rows: int, columns: int, queries: int, keys: int, *, causal: bool
    ) -> Tensor:
        """Which pairs the lists name, (B, H, M, N) bool: block (j // columns) for block (i // rows) of the queries.

        indices: (B, H, ⌈M / rows⌉, K) int32, contiguous, below 0 for none. causal: of them those with j <= i + N - M.
        """
        ...

    def equal_ids(self, query_ids: Tensor, key_ids: Tensor, *, causal: bool) -> Tensor:
        """Which pairs have equal ids, (B, H, M, N) bool; causal as of `listed_pairs`.

        query_ids, key_ids: (B or 1, H or 1, M) and (B or 1, H or 1, N) int64, whose last axes are contiguous.
        """
        ...

    def keys_at_once(self) -> int:
        """The keys of a vector: what is computed are whole ones."""
        ...

    def rows_as_they_are(self, problem: Problem) -> int:
        """The most rows of a key head for which keys are multiplied as they lie, and none without need."""
        ...

    def row_parts(self, units: int, rows: int) -> int:
        """In how many parts the rows of each of so many key heads are cut, so that all threads have work."""
        ...


class GatheredKeys(Protocol):
    """Attention to listed keys, which are read where they are: work in proportion to the lists.

    Where a list is that of a key head, or of a block of queries, what it names is read once for all of their rows. A
    row of which no key is left has output 0 and log-sum-exp -inf.

    in_tiles: whether it computes lists in tiles, as the flash kernel of its backend does: that is its price.
    """

    in_tiles: bool

    def why_not(self, problem: Problem) -> list[str]:
        """Reasons against a problem; never by the values of its tensors."""
        ...

    def forward(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> Rows:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M)."""
        ...

    def backward(
        self, batched: BatchedProblem, saved: Saved, lists: KeyLists, terms: ListTerms, *, of_added: bool
    ) -> ListGradients:
        """The gradients, that of what is added if it is asked for; on a CPU the same for every number of threads."""
        ...


class WholeAdditive(Protocol):
    """The same as `AdditiveTiles` for calls of a kind, over all of few pairs at once."""

    def forward(self, pairs: AdditivePairs, value: Tensor) -> Rows:
        """Output and log-sum-exp."""
        ...

    def backward(
        self, pairs: AdditivePairs, value: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, weight and value."""
        ...


class AdditiveTiles(Protocol):
    """Attention with scores weight · tanh(q + k), which are not stored."""

    def prepare_whole(
        self, pairs: AdditivePairs, value: Tensor, softcap: float | None, absent: Tensor | None
    ) -> WholeAdditive | None:
        """What computes calls like this one; None where they are better computed by tiles.

        absent: what a mask adds to scores, (B, H, M, N), 0 or -inf.
        """
        ...

    def forward(self, batched: BatchedProblem, tile: int) -> Rows:
        """Output and log-sum-exp; `tile` scores at once where mask, bias or dropout have a number for each pair."""
        ...

    def backward(self, batched: BatchedProblem, saved: Saved, tile: int) -> ProblemGradients:
        """The gradients of query, key, weight and value, and of a bias where `saved` asks for it."""
        ...


class TileWriter(Protocol):
    """Computes the weights of tiles, exp(score - lse), one after another."""

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (B, H, m, n), and the terms weight · log₂ weight if requested, in a buffer that the next overwrites.

        masked: whether some of the tile's pairs are masked.
        """
        ...


class WeightPass(Protocol):
    """The weights of a problem, computed again from the log-sum-exp of its rows, for lenses."""

    def reduces(self, problem: Problem) -> bool:
        """Whether `reduce` computes a problem; if not, its tiles are written and added up by torch."""
        ...

    def takes(self, form: WeightForm) -> bool:
        """Whether `reduce` fills a form; if not, tiles are written for it."""
        ...

    def reduce(self, batched: BatchedProblem, lse: Tensor, forms: Sequence[WeightForm]) -> None:
        """Add up what lenses ask for, in one pass that stores no weights; lse (B, H, M)."""
        ...

    def writer(self, batched: BatchedProblem, lse: Tensor) -> TileWriter | None:
        """What writes the tiles of a problem; None where it cannot. lse (B, H, M, 1), `FAR` where weights are 0."""
        ...


class TokenStep(Protocol):
    """One token of a linear recurrence, for tensors of one layout: what shapes and dtypes decide is computed once.

    A state is one tensor (B, Hk, D · Dv), or (B, Hk, D · Dv + D) with the total after the matrix where normalised:
    `state_shape`. Tokens that it lacks are apart, (B, Hk, `recent_capacity`, `recent_width`): of each φ(k), u, and the
    `decay_dim` factors of its decay, as writing a state takes longer than reading it. Both are float32 and contiguous.
    """

    feature_map: FeatureMapName
    normalize: bool
    scale: float
    dim: int
    value_dim: int
    decay_dim: int
    state_shape: Size
    recent_capacity: int
    recent_width: int

    def takes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        removal: Tensor | None = None,
    ) -> bool:
        """Whether tensors are of its device and have the layout; of what it has no gate of, there has to be none."""
        ...

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
        """The output (B, H, 1, Dv). Without `recent`, `target` gets the new state.

        With it, the token is appended to the first `recent_count` of `recent`, in place. Where there is a target too,
        the tokens before are first added to the state, which `target`, perhaps the same memory, gets; the token is then
        the first of `recent`.
        """
        ...

    def in_one_call(self) -> bool:
        """Whether `run` fails before anything is written or not at all."""
        ...


class RecurrencePass(Protocol):
    """The outputs of the recurrence from a state of 0, for tensors of one layout, whose numbers are checked."""

    def forward(
        self, inputs: RecurrenceInputs, *, stores: bool = False, bonus: Tensor | None = None
    ) -> tuple[Tensor, StoredRecurrence] | None:
        """The output, and if `stores` what `backward` needs.

        None where query, key, value or removal are not finite, a decay is above 0, or a beta not within 0..2. bonus: b,
        finite float32 that broadcasts to the keys: the state is then read before the token, whose own value has the
        weight q · (b ⊙ k), as `backward` does not have it; without a feature map, a total or the delta rule.
        """
        ...

    def backward(
        self, inputs: RecurrenceInputs, stored: StoredRecurrence, grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs, in their order."""
        ...


class Recurrences(Protocol):
    """S_t = e^{g_t} S_{t-1} + φ(k_t) u_tᵀ and o_t = S_tᵀ φ(q_t): linear attention over keys that have an order."""

    def why_not(self, problem: RecurrenceProblem) -> list[str]:
        """Reasons against a problem whose query, key and value are of a kind that the backend computes."""
        ...

    def segments(self, problem: RecurrenceProblem) -> int:
        """The number of states that `forward` stores for `backward`, of each key head."""
        ...

    def forward(self, problem: RecurrenceProblem, *, stores_borders: bool = False) -> RecurrenceResult:
        """The outputs and the final state; stores_borders: with the states that `backward` starts from."""
        ...

    def backward(
        self,
        problem: RecurrenceProblem,
        border_state: Tensor,
        grad_output: Tensor,
        grad_state: Tensor | None = None,
        *,
        grad_total: Tensor | None = None,
        output: Tensor | None = None,
        row_total: Tensor | None = None,
        border_total: Tensor | None = None,
    ) -> RecurrenceGradients:
        """The gradients of all inputs, from those of the output and of the final state and total; None for 0.

        border_state: of `forward`; where outputs are divided by their totals, so are output, row_total and
        border_total, which are needed there.
        """
        ...

    def prepare_pass(self, problem: RecurrenceProblem, scale: float) -> RecurrencePass | None:
        """What computes outputs alone of such tensors without a state; None where there is nothing for them.

        scale: of queries, before the feature map.
        """
        ...

    def prepare_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        removal: Tensor | None = None,
        *,
        feature_map: FeatureMapName,
        normalize: bool,
        scale: float,
        recent_share: float,
    ) -> TokenStep | None:
        """What computes one token of such tensors; None where there is nothing for them.

        Shapes: query (B, H, 1, D), key (B, Hk, 1, D), value (B, Hk, 1, Dv), contiguous; decay (B or 1, Hk, 1), or
        (B or 1, Hk, 1, D) for each feature, beta (B, Hk, 1), removal (B, Hk, 1, D), the key whose value the delta rule
        removes, where it is another one. scale: of queries, before the feature map. recent_share: the most that tokens
        which a state lacks may take, as a share of it.
        """
        ...


Work: TypeAlias = Callable[[], object]
"""A call that is timed."""


class TimedFlash(Protocol):
    """Calls of the fastest flash kernel of a backend, whose times give its rates: all pairs, without mask and bias.

    few_rows: (rows, dim) of a forward pass of which what it packs takes much of the time. begins_tiles: whether a
    backward pass takes noticeable time to begin each tile. Shapes: query (1, H, M, D), key and value (1, H, N, D).
    """

    few_rows: tuple[int, int]
    begins_tiles: bool

    def dtypes(self, device: str) -> tuple[dtype, ...]:
        """Those of which rates are measured on a kind of device, `torch.device.type`."""
        ...

    def packing_rows(self, rows: int) -> int:
        """The rows, of so many, for which a block of keys and values is packed once."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Work:
        """The forward pass."""
        ...

    def backward(self, query: Tensor, key: Tensor, value: Tensor) -> Work:
        """The backward pass of a forward pass that is done here, once."""
        ...

    def stream(self, key: Tensor, value: Tensor) -> Work:
        """A row or two over keys and values that are read once."""
        ...


class NormalizerTiles(Protocol):
    """Attention with a normalizer other than softmax, over the tiles that a mask leaves."""

    def why_not(self, problem: Problem) -> list[str]:
        """Reasons against a problem; never by the values of its tensors."""
        ...

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs whose scores are computed, each as often as it is."""
        ...

    def forward(self, batched: BatchedProblem) -> Rows:
        """Output, and what the normalizer says of each row: a threshold, or the log-sum-exp; -inf without keys."""
        ...

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of query, key and value, of a bias and of the normalizer; `Saved.lse` has what rows said."""
        ...


class Backend(Protocol):
    """A maker of what kernels describe. A group that it does not have is None."""

    name: str
    nan_safe: bool
    """Whether its results need no look, which would wait for a device: results of `flash`, `few_queries`, `short` and
    `additive` are `CheckedRows` and checked gradients for any numbers.

    NaN or infinity in a masked key, or its value, reaches no row and no gradient. A row that attends to NaN, and one
    that attends to infinity in a query or key under a tanh, has NaN in output and log-sum-exp, and no part in
    gradients. `backward` takes log-sum-exps as `forward` gave them: of any size, and -inf in rows without keys."""

    @property
    def flash(self) -> FlashTiles | None: ...

    @property
    def few_queries(self) -> FewQueries | None: ...

    @property
    def paged(self) -> PagedKeys | None: ...

    @property
    def short(self) -> ShortRows | None: ...

    @property
    def gathered(self) -> GatheredKeys | None: ...

    @property
    def additive(self) -> AdditiveTiles | None: ...

    @property
    def weights(self) -> WeightPass | None: ...

    @property
    def recurrences(self) -> Recurrences | None: ...

    @property
    def normalizer_tiles(self) -> Mapping[str, NormalizerTiles]:
        """By the name of the kernel that they are for."""
        ...

    @property
    def timed_flash(self) -> TimedFlash | None: ...

    def arithmetic(self, dtype: dtype) -> str | None:
        """How it multiplies numbers of a dtype, as a line of `explain`; None where there is nothing to tell."""
        ...

    def why_not(self, value: Tensor) -> list[str]:
        """Reasons why it does not compute tensors of this device and dtype; empty if it does."""
        ...

    def runs(self, *tensors: Tensor) -> bool:
        """Whether `why_not` has no reasons against any of these, quickly: it is asked in every call."""
        ...
