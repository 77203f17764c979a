"""What is remembered of a mask holds as long as what it reads: functions, objects and tensors of the user's."""

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

import regard
from regard import biases, masks, native
from regard.errors import ConfigurationError, ModifiedError
from regard.kernels import KERNELS, make_problem
from regard.kernels.flex import FlexKernel
from regard.kernels.planning import signature
from regard.masks import Mask
from regard.masks.key_spans import KeySpan
from regard.masks.parts import Part
from regard.tiles import memo
from regard.tiles.memo import memo_of

LIMITS = (3, 100, 41)
KEYS = 601
LIMIT = 0
TABLE = {"limit": 0}
SETTINGS = types.ModuleType("settings")


class Static:
    limit = 0


class Reader:
    """A user's object: its method reads an attribute, which is the class's until it is set."""

    limit = 0

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.allows(k)

    def allows(self, key: Tensor) -> Tensor:
        return key <= self.limit


class Slotted:
    __slots__ = ("limit",)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= self.limit


class Buffered(torch.nn.Module):
    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(0))
        self.mask = masks.from_mod(self.allows)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= self.limit


def allowed_by_helper(key: Tensor) -> Tensor:
    return key <= LIMIT


Change = Callable[[int], object]
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def set_global(limit: int) -> None:
    global LIMIT
    LIMIT = limit


def set_content(function: Any, value: object) -> None:
    function.__closure__[0].cell_contents = value


def readers() -> dict[str, tuple[Any, Any]]:
    """Functions of pairs (b, h, q, k) that allow keys up to a limit, and how the limit is changed."""
    at, limits, numbers = torch.tensor(0), [0, 7], {0}
    reader, slotted, buffered = Reader(), Slotted(), Buffered()
    slotted.limit = 0

    def closed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= at

    def rebound(value: int) -> Mod:
        return lambda b, h, q, k: k <= value

    def defaulted(b: Tensor, h: Tensor, q: Tensor, k: Tensor, limit: Tensor = at) -> Tensor:
        return k <= limit

    def fill_set(limit: int) -> None:
        numbers.clear()
        numbers.add(limit)

    def attribute(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= attribute.limit  # type: ignore[attr-defined]

    attribute.limit = 0  # type: ignore[attr-defined]
    moved = rebound(0)
    return {
        "tensor of a closure": (closed, at.fill_),
        "content of a closure": (moved, lambda limit: set_content(moved, limit)),
        "global": (lambda b, h, q, k: k <= LIMIT, set_global),
        "global of a helper": (lambda b, h, q, k: allowed_by_helper(k), set_global),
        "entry of a dictionary": (lambda b, h, q, k: k <= TABLE["limit"], lambda n: TABLE.update(limit=n)),
        "item of a list": (lambda b, h, q, k: k <= limits[0], lambda n: limits.__setitem__(0, n)),
        "set": (lambda b, h, q, k: k <= max(numbers), fill_set),
        "default": (defaulted, at.fill_),
        "partial": (functools.partial(lambda limit, b, h, q, k: k <= limit, at), at.fill_),
        "attribute of an object": (reader, lambda limit: setattr(reader, "limit", limit)),
        "bound method": (slotted.allows, lambda limit: setattr(slotted, "limit", limit)),
        "buffer of a module": (buffered.allows, buffered.limit.fill_),
        "replaced buffer": (buffered.allows, lambda n: buffered.register_buffer("limit", torch.tensor(n))),
        "class": (lambda b, h, q, k: k <= Static.limit, lambda limit: setattr(Static, "limit", limit)),
        "module": (lambda b, h, q, k: k <= SETTINGS.limit, lambda limit: setattr(SETTINGS, "limit", limit)),
        "attribute of a function": (attribute, lambda limit: setattr(attribute, "limit", limit)),
        "functions joined by torch": (and_masks(closed, lambda b, h, q, k: k >= 0), at.fill_),
        "found by name": (lambda b, h, q, k: k <= getattr(SETTINGS, "limit"), lambda n: setattr(SETTINGS, "limit", n)),  # noqa: B009
        "generator": (lambda b, h, q, k: k <= next(iter([at])), at.fill_),
    }


def inputs(rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(1, 2, length, 16) for length in (rows, KEYS, KEYS))
    return query, key, value


def over_first(query: Tensor, key: Tensor, value: Tensor, limit: int) -> Tensor:
    """Attention over keys 0..limit, in float64."""
    key, value = key[..., : limit + 1, :].double(), value[..., : limit + 1, :].double()
    weights = torch.softmax(query.double() @ key.mT / key.shape[-1] ** 0.5, -1)
    return weights @ value


def assert_follows(make: Callable[[], Mask], change: Change, rows: int = 1, kernel: str | None = None) -> None:
    """Every change is seen, by a mask that is kept and by one that is made anew."""
    query, key, value = inputs(rows)
    change(LIMITS[0])
    kept = make()
    for limit in (*LIMITS, *LIMITS):
        change(limit)
        expected = over_first(query, key, value, limit)
        for mask in (kept, make(), masks.prefix(KEYS) & kept):
            for _ in range(2):
                found = regard.attention(query, key, value, mask=mask, kernel=kernel)
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", readers())
@pytest.mark.parametrize("rows", [1, 67])
def test_whatever_a_function_reads(name, rows):
    SETTINGS.limit = 0  # type: ignore[attr-defined]
    function, change = readers()[name]
    assert_follows(lambda: masks.from_mod(function), change, rows)


ABLE = [
    kernel.name
    for kernel in KERNELS
    if not kernel.why_not(make_problem(*inputs(), mask=masks.from_mod(lambda b, h, q, k: k <= 3)))
]


@pytest.mark.parametrize("kernel", ABLE)
def test_in_every_kernel(kernel):
    at = torch.tensor(0)
    assert_follows(lambda: masks.from_mod(lambda b, h, q, k: k <= at), at.fill_, kernel=kernel)


def test_compiled_code():
    at = torch.tensor(0)
    mask, (query, key, value) = masks.from_mod(lambda b, h, q, k: k <= at), inputs(67)
    gc.collect()
    attend = torch.compile(lambda q, k, v: regard.attention(q, k, v, mask=mask), backend="aot_eager", fullgraph=True)
    for limit in LIMITS:
        at.fill_(limit)
        expected = over_first(query, key, value, limit)
        torch.testing.assert_close(attend(query, key, value).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tensor of a closure", "global", "item of a list", "bound method"])
def test_a_compiled_kernel(name):
    kernel, (function, change) = FlexKernel("aot_eager", ("cpu",)), readers()[name]
    query, key, value = inputs(67)
    change(LIMITS[0])
    kept = masks.from_mod(function)
    for limit in LIMITS:
        change(limit)
        for mask in (kept, masks.from_mod(function)):
            found = kernel.run(make_problem(query, key, value, mask=mask, wants_lse=True)).output
            torch.testing.assert_close(found.double(), over_first(query, key, value, limit), rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class UpTo(Mask):
    """A user's mask, whose formula and spans read a tensor that is no field."""

    def keep(self, grid):
        return grid.key <= AT

    def key_span(self) -> KeySpan:
        return lambda queries: (None, int(AT) + 1)


@dataclass(frozen=True)
class Residues(Mask):
    """A user's mask that has parts, or none."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(None, step=STEP),) if STEP > 1 else ()

    def keep(self, grid):
        return (grid.query - grid.key) % STEP == 0


class Changing(Mask):
    """A user's mask that is no frozen dataclass."""

    def __init__(self) -> None:
        self.limit = 0

    def keep(self, grid):
        return grid.key <= self.limit


AT = torch.tensor(0)
STEP = 2


@pytest.mark.parametrize("rows", [1, 13, 67])
def test_formulas_and_spans_of_user_masks(rows):
    assert_follows(UpTo, AT.fill_, rows)
    changing = Changing()
    assert_follows(lambda: changing, lambda limit: setattr(changing, "limit", limit), rows)


@pytest.mark.skipif(not native.available(), reason="without native code no call is small")
def test_small_calls_of_user_masks():
    query, key, value = (torch.randn(1, 2, 11, 16) for _ in range(3))
    for limit in (2, 7, 4):
        AT.fill_(limit)
        for _ in range(3):
            found = regard.attention(query, key, value, mask=UpTo())
            torch.testing.assert_close(found.double(), over_first(query, key, value, limit), rtol=1e-5, atol=1e-5)


def test_parts_of_user_masks(monkeypatch):
    query, key, value = inputs(KEYS)
    mask = masks.causal() & Residues()
    for step in (2, 1, 3, 1):
        monkeypatch.setitem(globals(), "STEP", step)
        expected = regard.attention(query, key, value, mask=mask, kernel="reference")
        torch.testing.assert_close(regard.attention(query, key, value, mask=mask), expected, rtol=1e-5, atol=1e-5)
        if step > 1:
            found = regard.attention(query, key, value, mask=mask, kernel="decomposed")
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_function_that_is_traced_for_another_state():
    """From operators, which are broadcast, to a sum, which counts all pairs unless it is mapped, and back."""
    whole = [False]

    def mod(b, h, q, k):
        return ((q - k) * torch.ones(2)).sum() == 0 if whole[0] else q == k

    mask = masks.from_mod(mod)
    for each in (False, True, False):
        whole[0] = each
        assert mask.dense(5, 5).equal(torch.eye(5, dtype=torch.bool))
        assert mask.tiles(4, 4, 2)[0, 1].item() == (1 if each else 0)


def test_a_bias_that_is_traced_for_another_state():
    whole = [False]

    def mod(score, b, h, q, k):
        return score + (((q - k) * torch.ones(2)).sum() / 2 if whole[0] else q * 1.0 - k * 1.0)

    bias, positions = biases.from_mod(mod), torch.arange(5.0)
    query = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    for each in (False, True, False):
        whole[0] = each
        found = regard.attention(query, query, query, bias=bias)
        expected = regard.attention(query, query, query, bias=(positions[:, None] - positions).double())
        torch.testing.assert_close(found, expected)


def test_a_bias_by_distance_that_is_none_any_more_is_refused():
    apart = [False]
    bias = biases.from_mod(lambda score, b, h, q, k: score + (q * 1.0 - k if apart[0] else (q - k) * 1.0))
    query = torch.randn(1, 1, 5, 8)
    expected = regard.attention(query, query, query, bias=bias)
    apart[0] = True
    with pytest.raises(ConfigurationError, match="reads them apart now: make the bias anew, by from_mod"):
        regard.attention(query, query, query, bias=bias)
    apart[0] = False
    assert regard.attention(query, query, query, bias=bias).equal(expected)


def test_a_bias_of_another_learned_tensor_is_refused():
    weights = [torch.tensor(1.0, requires_grad=True)]
    bias = biases.from_mod(lambda score, b, h, q, k: score + weights[0] * (q - k))
    query = torch.randn(1, 1, 5, 8)
    regard.attention(query, query, query, bias=bias)
    weights[0] = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ConfigurationError, match="uses another tensor with a gradient than when the bias was made"):
        regard.attention(query, query, query, bias=bias)


@pytest.mark.parametrize("length", [200, 520])
def test_documents_in_order_and_out_of_order_of_one_shape(length, monkeypatch):
    """Of the former, rows are spans of keys, which `short` takes, of the latter not."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)  # so that kernels are compared for a single head
    query, key, value = (torch.randn(1, 1, length, 16) for _ in range(3))
    ids = torch.arange(length) // 50
    for each in (ids, ids.flip(0), (ids * 7) % 3):
        found = regard.attention(query, key, value, mask=masks.documents(each))
        expected = regard.attention(query, key, value, mask=masks.documents(each), kernel="reference")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        plan = regard.explain(query, key, value, mask=masks.documents(each))
        assert plan.kernel.why_not(plan.problem) == []


class TestMemoryOfOthers:
    """Torch does not count what NumPy writes to memory that both have: such a tensor is read in every call."""

    def follows(self, make: Callable[[], Mask], write: Callable[[int], object], rows: int = 67) -> None:
        query, key, value = inputs(rows)
        write(LIMITS[0])
        kept = make()
        for limit in LIMITS:
            write(limit)
            expected = over_first(query, key, value, limit)
            for mask in (kept, make(), masks.prefix(KEYS) & kept):
                found = regard.attention(query, key, value, mask=mask)
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("shared_by", ["from_numpy", "numpy"])
    def test_a_mask_of_pairs(self, shared_by):
        keep = torch.zeros(67, KEYS, dtype=torch.bool)
        array = keep.numpy() if shared_by == "numpy" else np.zeros((67, KEYS), dtype=bool)
        keep = keep if shared_by == "numpy" else torch.from_numpy(array)
        self.follows(lambda: masks.where(keep=keep), lambda limit: np.copyto(array, np.arange(KEYS) <= limit))

    def test_a_mask_that_shares_its_memory_later(self):
        keep = torch.arange(KEYS) <= 30
        query, key, value = inputs()
        mask = masks.where(keep=keep)
        regard.attention(query, key, value, mask=mask)
        keep.numpy()[:4] = False
        keep.numpy()[4:] = True
        expected = over_first(query, key[:, :, 4:], value[:, :, 4:], KEYS)
        found = regard.attention(query, key, value, mask=mask)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("make", [masks.padding, masks.prefix])
    def test_lengths(self, make):
        array = np.array([0])
        lengths = torch.from_numpy(array)
        self.follows(lambda: make(lengths), lambda limit: array.fill(limit + 1))
        self.follows(lambda: make(lengths), lambda limit: lengths.fill_(limit + 1))

    def test_documents(self):
        array = np.zeros(KEYS, dtype=np.int64)
        ids = torch.from_numpy(array)
        at = torch.zeros(67, dtype=torch.int64)
        query, key, value = inputs(67)
        for limit in LIMITS:
            np.copyto(array, np.arange(KEYS) > limit)
            found = regard.attention(query, key, value, mask=masks.documents(ids), query_positions=at)
            torch.testing.assert_close(found.double(), over_first(query, key, value, limit), rtol=1e-5, atol=1e-5)

    def test_a_function(self):
        array = np.array(0)
        at = torch.from_numpy(array)
        self.follows(lambda: masks.from_mod(lambda b, h, q, k: k <= at), array.fill)

    def test_an_array_is_copied(self):
        lengths = np.array([300])
        mask = masks.padding(lengths)  # type: ignore[arg-type]
        lengths.fill(7)
        assert mask.dense(1, KEYS).sum() == 300

    def test_no_kernel_shares_the_memory_of_a_mask(self):
        """By `numpy()`, after which torch's own writes would be taken for those of others."""
        at = torch.tensor(5)
        for kernel in ABLE:
            keep = torch.rand(11, KEYS) > 0.5
            query, key, value = inputs(11)
            for mask in (masks.where(keep=keep), masks.from_mod(lambda b, h, q, k: k >= at)):
                regard.attention(query, key, value, mask=mask, kernel=kernel)
                assert memo_of(mask).state is not None, kernel

    def test_a_bias_is_read_in_every_call(self):
        array = np.zeros((67, KEYS))
        bias, (query, key, value) = torch.from_numpy(array), (each.double() for each in inputs(67))
        for number in (0.0, 3.0, -1.0):
            array[:, 1] = number
            scores = query @ key.mT / 4 + torch.tensor(array)
            found = regard.attention(query, key, value, bias=biases.tensor(bias))
            torch.testing.assert_close(found, scores.softmax(-1) @ value)


class TestBackward:
    """A backward pass evaluates mask and bias again: it refuses those that have changed, as torch's operations do."""

    MESSAGE = "one of the variables needed for gradient computation has been modified: {} from_mod"

    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (tensor.requires_grad_() for tensor in inputs(11))
        return query, key, value

    @pytest.mark.parametrize("kernel", [None, *(name for name in ABLE if name != "reference")])
    def test_a_mask(self, kernel):
        at, tensors = torch.tensor(40), self.learned()
        output = regard.attention(*tensors, mask=masks.from_mod(lambda b, h, q, k: k <= at), kernel=kernel)
        expected = torch.autograd.grad(over_first(*tensors, 40).sum(), tensors)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), tensors, retain_graph=True), expected)
        at.fill_(7)
        with pytest.raises(ModifiedError, match=self.MESSAGE.format("mask")) as raised:
            output.sum().backward()
        assert isinstance(raised.value, RuntimeError)

    @pytest.mark.parametrize("kernel", ["decode", "block_sparse", "tiled"])
    def test_a_bias(self, kernel):
        off, tensors = [1], self.learned()
        bias = biases.from_mod(lambda score, b, h, q, k: score + k % 7 * off[0])
        output = regard.attention(*tensors, bias=bias, kernel=kernel)
        output.sum().backward(retain_graph=True)
        off[0] = 2
        with pytest.raises(ModifiedError, match=self.MESSAGE.format("bias")):
            output.sum().backward()

    def test_what_the_graph_has_is_its_own(self):
        """`reference` evaluates nothing again: its gradient is that of the forward pass."""
        at, tensors = torch.tensor(40), self.learned()
        mask = masks.from_mod(lambda b, h, q, k: k <= at)
        output = regard.attention(*tensors, mask=mask, kernel="reference")
        at.fill_(7)
        expected = torch.autograd.grad(over_first(*tensors, 40).sum(), tensors)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), tensors), expected)

    @pytest.mark.skipif(not native.available(), reason="without native code no call is short")
    def test_spans_of_a_short_call(self):
        """They are kept from the forward pass; a second derivative, for which they do not suffice, is refused."""
        lengths = torch.tensor([5])
        query, key, value = tensors = [torch.randn(1, 2, 11, 16).requires_grad_() for _ in range(3)]
        for _ in range(2):
            lengths.fill_(5)
            output = regard.attention(*tensors, mask=masks.padding(lengths))
            lengths.fill_(7)
            expected = torch.autograd.grad(over_first(query, key, value, 4).sum(), tensors)
            torch.testing.assert_close(torch.autograd.grad(output.sum(), tensors, retain_graph=True), expected)
            with pytest.raises(RuntimeError, match="one of the variables needed for gradient computation"):
                torch.autograd.grad(output.sum(), tensors, create_graph=True)

    def test_a_second_derivative(self):
        at, tensors = torch.tensor(40), self.learned()
        output = regard.attention(*tensors, mask=masks.from_mod(lambda b, h, q, k: k <= at), kernel="tiled")
        (grad,) = torch.autograd.grad(output.square().sum(), tensors[:1], create_graph=True)
        at.fill_(7)
        with pytest.raises(ModifiedError, match=self.MESSAGE.format("mask")):
            grad.sum().backward()

    def test_a_function_that_counts_its_calls_is_no_change(self):
        calls, tensors = [], self.learned()

        def mod(b, h, q, k):
            calls.append(1)
            return k <= 40

        for _ in range(2):
            output = regard.attention(*tensors, mask=masks.from_mod(mod), kernel="tiled")
        assert len(torch.autograd.grad(output.sum(), tensors)) == 3


class TestWhatIsRemembered:
    @pytest.fixture
    def computed(self) -> Callable[[Mask], int]:
        """How often a value of a mask was computed, of two calls for each mask."""

        def count(*given: Mask) -> int:
            times = []
            for mask in given:
                for _ in range(2):
                    memo.memoize(make_problem(*inputs(), mask=mask), "a test", lambda: times.append(1))
            return len(times)

        return count

    @pytest.mark.parametrize("name", sorted(readers().keys() - {"found by name", "generator"}))
    def test_what_is_known_to_be_unchanged(self, name, computed):
        SETTINGS.limit = 0  # type: ignore[attr-defined]
        function, change = readers()[name]
        change(LIMITS[0])
        assert computed(masks.from_mod(function), masks.from_mod(function)) == 1
        change(LIMITS[1])
        assert computed(masks.from_mod(function)) == 1

    def test_masks_that_are_made_anew(self, computed):
        assert computed(masks.window(before=93), masks.window(before=93)) == 1
        assert computed(UpTo(), UpTo()) == 1
        lengths = torch.tensor([3])
        assert computed(masks.padding(lengths), masks.padding(lengths)) == 2  # equal are masks, not their tensors

    @pytest.mark.parametrize(
        "function",
        [
            lambda b, h, q, k: torch.rand(()) * k < 1,
            lambda b, h, q, k: k <= globals()["LIMIT"],
            lambda b, h, q, k: k <= next(iter((3,))),
            lambda b, h, q, k: k <= FOREIGN,
            functools.partial(lambda log, b, h, q, k: log.append(1) or k <= 3, []),
        ],
        ids=["random", "dynamic", "iterator", "NumPy's memory", "writes"],
    )
    def test_nothing_of_what_cannot_be_known(self, function, computed):
        assert computed(masks.from_mod(function)) == 2

    def test_what_cannot_be_known_is_computed_once_while_a_kernel_is_chosen(self, monkeypatch):
        monkeypatch.setattr(signature, "_choices", {})
        counted, verdicts = [], Mask.verdicts
        monkeypatch.setattr(
            Mask, "verdicts", lambda self, blocks: counted.append(blocks.rows) or verdicts(self, blocks)
        )
        at = torch.from_numpy(np.array(3))
        regard.explain(*inputs(67), mask=masks.from_mod(lambda b, h, q, k: k <= at))
        assert len(counted) == len(set(counted)) > 0

    def test_choices_hold_for_other_values(self, monkeypatch):
        """Of a cache that fills up, and of each batch's own lengths: no kernel is chosen again."""
        monkeypatch.setattr(signature, "_choices", {})
        at, (query, key, value) = torch.tensor(0), inputs(300)
        for limit in LIMITS:
            at.fill_(limit)
            regard.explain(query, key, value, mask=masks.from_mod(lambda b, h, q, k: k <= at))
        assert len(signature._choices) == 1
        for limit in LIMITS:
            regard.explain(query, key, value, mask=masks.causal() & masks.padding([limit]))
        assert len(signature._choices) == 2
        regard.explain(query, key, value, mask=masks.causal() & masks.padding(torch.tensor(3)))
        regard.explain(query, key, value, mask=masks.causal() & masks.from_mod(lambda b, h, q, k: k <= at))
        assert len(signature._choices) == 4

    def test_choices_of_user_masks_are_of_one_state(self, monkeypatch):
        monkeypatch.setattr(signature, "_choices", {})
        query, key, value = inputs(300)
        for limit in LIMITS:
            AT.fill_(limit)
            for _ in range(2):
                regard.explain(query, key, value, mask=UpTo())
        assert len(signature._choices) == len(LIMITS)

    def test_a_copy_has_a_memo_of_its_own(self, computed):
        mask = Changing()
        assert computed(mask) == 1
        other = copy.copy(mask)
        other.limit = 5
        assert computed(other) == 1
        assert memo_of(other) is not memo_of(mask)
        assert pickle.loads(pickle.dumps(masks.causal() & UpTo())) == masks.causal() & UpTo()

    def test_what_a_mask_reads_is_forgotten_with_it(self):
        """A module that has a mask of its own method, which reads the module."""
        module = Buffered()
        regard.attention(*inputs(), mask=module.mask)
        gone = weakref.ref(module)
        memo._recent_masks.clear()
        del module
        gc.collect()
        assert gone() is None

    def test_large_tensors_are_not_kept(self):
        large = torch.zeros(2**17, dtype=torch.bool)
        mask = masks.from_mod(lambda b, h, q, k: large[k])
        memo_of(mask)
        assert mask not in memo._recent_masks


FOREIGN = torch.from_numpy(np.array(3))
