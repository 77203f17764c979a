import functools

import pytest
import torch

import regard
from regard import biases
from regard.biases import RelativeBias
from regard.biases.score_mod import ScoreModBias
from regard.core.grid import Grid
from regard.errors import ConfigurationError, ShapeError

SLOPES = torch.tensor([0.5, 0.25, 0.125])
TABLE = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])


def by_slope(score, b, h, q, k):
    return score - SLOPES[h] * (q - k).abs()


def by_row_of_a_table(score, b, h, q, k):
    return score + TABLE[h][q - k + 8]


def by_document(score, b, h, q, k):
    return torch.where(DOCUMENTS[b, q] == DOCUMENTS[b, k], score + 1.5, score)


def by_sum_of_a_row(score, b, h, q, k):
    return score + TABLE[h].sum() * (q - k)


def everywhere(score, b, h, q, k):
    return score + 2


def nothing(score, b, h, q, k):
    return score


MODS = {
    by_slope: ({"heads": 3}, True),
    by_row_of_a_table: ({"heads": 3}, False),
    by_document: ({"batch": 2}, True),
    by_sum_of_a_row: ({"heads": 3}, False),
    everywhere: ({}, True),
    nothing: ({}, True),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("tile", [(slice(0, 4), slice(0, 5)), (slice(1, 2), slice(0, 4)), (slice(0, 4), slice(2, 2))])
def test_what_the_function_adds_pair_by_pair(mod, tile):
    sizes, elementwise = MODS[mod]
    bias = biases.from_mod(mod, **sizes)
    assert isinstance(bias, ScoreModBias)
    assert bias.function.elementwise == elementwise
    grid = Grid.from_lengths(4, 5)
    expected = torch.zeros(2, 3, 4, 5)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, expected.shape)):
        expected[b, h, i, j] = mod(torch.tensor(0.0), b, h, i + 1, j)
    values = bias.values(grid.tile(*tile))
    expected = expected[..., tile[0], tile[1]]
    torch.testing.assert_close(values.expand_as(expected), expected)


def test_positions_per_batch():
    positions = torch.tensor([[2, 5, 9], [0, 1, 2]])
    grid = Grid.from_lengths(3, 3, query_positions=positions, key_positions=positions)
    for mod in (by_slope, lambda score, b, h, q, k: score - SLOPES[h].sum() * (q - k).abs()):
        values = biases.from_mod(mod, heads=3).values(grid)
        torch.testing.assert_close(values, -SLOPES[:, None, None] * (grid.query - grid.key).abs())


def test_in_attention():
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    output = regard.attention(query, key, value, bias=biases.from_mod(by_slope, heads=3))
    torch.testing.assert_close(output, regard.attention(query, key, value, bias=biases.alibi(SLOPES)))


class Holder:
    def __init__(self, table):
        self.table = table

    def mod(self, score, b, h, q, k):
        return score + self.table[h, q - k + 8]


def added(table, score, b, h, q, k):
    return score + table.mT[q - k + 8, h]


@pytest.mark.parametrize(
    "capture",
    [
        lambda table: lambda score, b, h, q, k: score + table[h, q - k + 8],
        lambda table: lambda score, b, h, q, k, held=(table,): score + torch.gather(held[0][h], 0, q - k + 8),
        lambda table: functools.partial(added, table),
        lambda table: Holder(table).mod,
    ],
    ids=["closure", "default", "partial", "attribute"],
)
def test_captured_tensors_are_parameters(capture):
    table, other = torch.randn(3, 16).double().requires_grad_(), torch.randn(3, 16).double()
    bias = biases.from_mod(capture(table), heads=3)
    (held,) = bias.parameters()
    assert held is table
    grid = Grid.from_lengths(4, 5)
    index = grid.query - grid.key + 8
    assert bias.values(grid).equal(table[:, index])
    assert bias.with_parameters([other]).values(grid).equal(other[:, index])
    assert bias.values(grid).equal(table[:, index])
    (gradient,) = torch.autograd.grad(bias.values(grid).sum(), table)
    assert gradient.equal(torch.autograd.grad(table[:, index].sum(), table)[0])


def test_a_gradient_out_of_sight():
    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx, table):
            return table[0] * 1

        @staticmethod
        def backward(ctx, *gradients):
            return gradients[0][None]

    table = torch.zeros(1, requires_grad=True)
    with pytest.raises(ConfigurationError, match="takes a gradient into a tensor that torch does not see it use"):
        biases.from_mod(lambda score, b, h, q, k: score + Lookup.apply(table))


def test_repr():
    assert repr(biases.from_mod(by_slope, batch=2, heads=3)) == "from_mod(by_slope, batch=2, heads=3)"
    assert repr(biases.from_mod(everywhere)) == "from_mod(everywhere)"


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q, k: 20 * torch.tanh(score / 20),
        lambda score, b, h, q, k: 1000 * torch.tanh(score / 1000),
        lambda score, b, h, q, k: score * 1.01,
        lambda score, b, h, q, k: torch.where(q >= k, score, 2 * score - 7),
    ],
    ids=["softcap", "wide softcap", "factor", "factor for later keys"],
)
def test_only_what_is_added_is_a_bias(mod):
    match = r"adds \S+ to a score of 0 and \S+ to a score of 64. A tanh cap is softcap=, a factor is scale=, and"
    with pytest.raises(ConfigurationError, match=match):
        biases.from_mod(mod).values(Grid.from_lengths(3, 3))


@pytest.mark.parametrize("blocked", [-torch.inf, torch.inf, torch.nan])
def test_a_bias_leaves_no_pair_out(blocked):
    bias = biases.from_mod(lambda score, b, h, q, k: torch.where((q - k).abs() < 2, score, blocked))
    assert bias.values(Grid.from_lengths(2, 2)).equal(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=r"to infinity or NaN. .*mask=masks.from_mod\(mask_mod\)"):
        bias.values(Grid.from_lengths(5, 5))


@pytest.mark.parametrize(("mod", "letter", "name"), [(by_slope, "h", "heads"), (by_document, "b", "batch")])
def test_sizes_are_told(mod, letter, name):
    match = rf"reads {letter}, so the bias differs between {name}: say how many there are, from_mod\(function, {name}="
    with pytest.raises(ConfigurationError, match=match):
        biases.from_mod(mod)


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_sizes_are_at_least_one(name):
    with pytest.raises(ConfigurationError, match=f"from_mod needs at least 1 as {name}; it is 0"):
        biases.from_mod(everywhere, **{name: 0})


def test_heads_that_are_not_there():
    with pytest.raises(ShapeError, match=r"from_mod\(by_slope, heads=3\) differs between heads, but .* no head axis"):
        biases.from_mod(by_slope, heads=3).values(Grid.from_lengths(3, 3, heads=False))


@pytest.mark.parametrize("wrong", [None, torch.zeros(3), biases.alibi(2)])
def test_a_function_is_needed(wrong):
    with pytest.raises(ConfigurationError, match=r"from_mod needs a function \(score, b, h, q, k\) -> score; it was"):
        biases.from_mod(wrong)


@pytest.mark.parametrize(
    ("mod", "returned"),
    [
        (lambda score, b, h, q, k: q >= k, r"torch.bool of shape \(\)"),
        (lambda score, b, h, q, k: score + torch.zeros(3), r"torch.float32 of shape \(3,\)"),
        (lambda score, b, h, q, k: 1.0, r"1.0"),
    ],
)
def test_a_number_is_returned(mod, returned):
    with pytest.raises(ConfigurationError, match=rf"returned {returned} for one pair; it needs one number"):
        biases.from_mod(mod)


def test_a_function_that_fails():
    with pytest.raises(ConfigurationError, match=r"fails for a score of 0 at b = h = q = k = 0: TypeError: .* five"):
        biases.from_mod(lambda score, q, k: score)  # type: ignore[arg-type]
    far = biases.from_mod(lambda score, b, h, q, k: score + SLOPES[q - k])
    with pytest.raises(ConfigurationError, match=r"cannot be evaluated: IndexError: .*torch.where stands for if"):
        far.values(Grid.from_lengths(9, 9))


class TestByDistance:
    """Functions that read q and k by their difference alone are biases by distance, and no others are."""

    STEEP, FLAT = torch.tensor([0.3, 0.7, 1.1]), torch.tensor([0.5, 0.2, 0.9])

    def kerple(self, score, b, h, q, k):
        return score - self.STEEP[h] * torch.log1p(self.FLAT[h] * (q - k).abs())

    @pytest.mark.parametrize(
        ("function", "sizes"),
        [
            (by_slope, {"heads": 3}),
            (everywhere, {}),
            (lambda s, b, h, q, k: torch.where(q >= k, s - 0.1 * (k - q), s), {}),
            (lambda s, b, h, q, k: s + torch.sub(q, k).float().sin() * SLOPES[h], {"heads": 3}),
            (lambda s, b, h, q, k: s + (q == k) * SLOPES[0], {"batch": 2}),
        ],
    )
    def test_differences_alone(self, function, sizes):
        bias = biases.from_mod(function, **sizes)
        assert isinstance(bias, RelativeBias)
        assert isinstance(bias, ScoreModBias)
        by_pair = ScoreModBias(bias.function, bias.batch, bias.heads, bias.tensors)
        scattered = Grid(torch.tensor([3, 9, 4]), torch.tensor([[1, 5], [0, 2]])[:, None], heads=True)
        for grid in (Grid.from_lengths(7, 11), scattered):
            values, expected = torch.broadcast_tensors(bias.values(grid), by_pair.values(grid))
            assert torch.equal(values, expected)

    @pytest.mark.parametrize(
        ("function", "sizes"),
        [
            (lambda s, b, h, q, k: s - 0.1 * q, {}),
            (lambda s, b, h, q, k: s - 0.1 * (q - k) * (k > 3), {}),
            (lambda s, b, h, q, k: s + (q - q) + 0.1 * (k - 1), {}),
            (lambda s, b, h, q, k: s + 0.1 * (q + k), {}),
            (lambda s, b, h, q, k: s + 0.1 * (q - k) * b, {"batch": 2}),
            (lambda s, b, h, q, k: s + torch.sub(q, k, alpha=2), {}),
            (by_row_of_a_table, {"heads": 3}),
            (by_document, {"batch": 2}),
            (lambda s, b, h, q, k: s + TABLE[h, (q - k).abs().clamp(max=15)], {"heads": 3}),
        ],
    )
    def test_whatever_else_is_read(self, function, sizes):
        assert not isinstance(biases.from_mod(function, **sizes), RelativeBias)

    def test_a_function_that_changes_is_read_anew(self):
        """Of what it depends on, tensors and numbers may change; that it reads positions apart is an error."""
        settings = {"slope": 0.5, "apart": False}

        def function(score, b, h, q, k):
            added = settings["slope"] * (q - k)
            return score + (added * q if settings["apart"] else added)

        bias, grid = biases.from_mod(function), Grid.from_lengths(2, 2)
        assert bias.evaluate(grid).tolist() == [[0.0, -0.5], [0.5, 0.0]]
        settings["slope"] = 2.0
        assert bias.evaluate(grid).tolist() == [[0.0, -2.0], [2.0, 0.0]]
        settings["apart"] = True
        with pytest.raises(ConfigurationError, match="reads them apart now: make the bias anew, by from_mod, after"):
            bias.evaluate(grid)

    @pytest.mark.parametrize("kernel", [None, "tiled", "reference", "block_sparse"])
    def test_output_and_gradients(self, kernel):
        """As those of the formula in float64; the parameters are the tensors that the function closes over."""
        steep, flat = (tensor.clone().requires_grad_() for tensor in (self.STEEP, self.FLAT))
        learned = biases.from_mod(lambda s, b, h, q, k: s - steep[h] * torch.log1p(flat[h] * (q - k).abs()), heads=3)
        query, key, value = (torch.randn(2, 3, 37, 8, requires_grad=True) for _ in range(3))
        held = [query, key, value] + ([steep, flat] if kernel != "block_sparse" else [])
        if kernel == "block_sparse":  # which has no gradient of a bias
            learned = biases.from_mod(self.kerple, heads=3)
        above = torch.randn(2, 3, 37, 8)
        output = regard.attention(query, key, value, bias=learned, mask=regard.masks.causal(), kernel=kernel)
        found = [output, *torch.autograd.grad(output, held, above)]
        exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value, steep, flat)]
        distance = (torch.arange(37)[:, None] - torch.arange(37)).abs().double()
        scores = exact[0] @ exact[1].mT / 8**0.5 - exact[3][:, None, None] * torch.log1p(
            exact[4][:, None, None] * distance
        )
        weights = scores.masked_fill(torch.ones(37, 37).triu(1).bool(), -torch.inf).softmax(-1)
        expected = weights @ exact[2]
        wanted = [expected, *torch.autograd.grad(expected, exact, above.double())]
        for mine, true in zip(found, wanted[: len(found)], strict=True):
            assert (mine - true).abs().max() <= 2e-5 * true.abs().max().clamp(min=1.0)

    @pytest.mark.skipif(not regard.native.available(), reason=str(regard.native.why_not()))
    def test_the_kernel_is_that_of_the_same_bias_by_distance(self):
        query = torch.zeros(1, 1, 1, 64).expand(1, 3, 2048, 64)
        function = biases.from_mod(self.kerple, heads=3)
        chosen = regard.explain(query, query, query, bias=function, mask=regard.masks.causal()).kernel.name
        assert (
            chosen == regard.explain(query, query, query, bias=biases.alibi(3), mask=regard.masks.causal()).kernel.name
        )
