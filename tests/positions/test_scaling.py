"""RoPE scalings against their formulas, pair by pair; errors."""

import math

import pytest
import torch

from regard.errors import ConfigurationError
from regard.positions import NTK, DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, YaRN, yarn_attention_factor

DIMS = [(4, 100.0), (32, 10000.0), (128, 10000.0), (128, 500000.0)]


def unscaled(dim, base):
    return [base ** (-2 * pair / dim) for pair in range(dim // 2)]


def frequencies(scaling, dim, base, length=3):
    found = Rotary(dim, base, scaling=scaling).frequencies(torch.arange(length))
    assert found.dtype == torch.float64
    return found.tolist()


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(("dim", "base"), DIMS)
class TestFormulas:
    def test_unscaled(self, dim, base):
        close(frequencies(None, dim, base), unscaled(dim, base))

    def test_linear(self, dim, base):
        close(frequencies(LinearScaling(4.0), dim, base), [frequency / 4 for frequency in unscaled(dim, base)])

    def test_linear_is_a_division_of_positions(self, dim, base):
        scaled = Rotary(dim, base, scaling=LinearScaling(8.0)).rotation(torch.arange(0, 80, 8), dtype=torch.float64)
        plain = Rotary(dim, base).rotation(torch.arange(10), dtype=torch.float64)
        torch.testing.assert_close(scaled.cos, plain.cos, atol=1e-12, rtol=0)
        torch.testing.assert_close(scaled.sin, plain.sin, atol=1e-12, rtol=0)

    def test_ntk(self, dim, base):
        found, plain = frequencies(NTK(8.0), dim, base), unscaled(dim, base)
        close(found, unscaled(dim, base * 8 ** (dim / (dim - 2))))
        # What it is for: the fastest stays, the slowest is divided by the factor.
        close([found[0], found[-1]], [1.0, plain[-1] / 8])

    @pytest.mark.parametrize("length", [1, 99, 100])
    def test_dynamic_ntk_leaves_short_sequences(self, dim, base, length):
        close(frequencies(DynamicNTK(2.0, 100), dim, base, length), unscaled(dim, base))

    @pytest.mark.parametrize("length", [101, 150, 1000])
    def test_dynamic_ntk(self, dim, base, length):
        found = frequencies(DynamicNTK(2.0, 100), dim, base, length)
        close(found, unscaled(dim, base * (2 * length / 100 - 1) ** (dim / (dim - 2))))
        close(found, frequencies(DynamicNTK(2.0, 100).for_length(length), dim, base))
        # With the factor 1 the slowest wave is stretched as much as the sequence.
        slowest = frequencies(DynamicNTK(1.0, 100), dim, base, length)[-1]
        close([slowest], [unscaled(dim, base)[-1] * 100 / length])

    @pytest.mark.parametrize("truncate", [True, False])
    def test_yarn(self, dim, base, truncate):
        scaling = YaRN(16.0, 4096, beta_fast=30.0, beta_slow=2.0, truncate=truncate)
        first, last = (dim * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (30.0, 2.0))
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        last = min(last, dim - 1)
        expected = []
        for pair, frequency in enumerate(unscaled(dim, base)):
            slow = min(max((pair - first) / (last - first), 0.0), 1.0)
            expected.append((1 - slow) * frequency + slow * frequency / 16)
        close(frequencies(scaling, dim, base), expected)

    def test_llama3(self, dim, base):
        scaling = Llama3(8.0, 8192, low_frequency_factor=1.5, high_frequency_factor=6.0)
        expected = []
        for frequency in unscaled(dim, base):
            wavelength = 2 * math.pi / frequency
            if wavelength < 8192 / 6:
                expected.append(frequency)
            elif wavelength > 8192 / 1.5:
                expected.append(frequency / 8)
            else:
                smooth = (8192 / wavelength - 1.5) / (6 - 1.5)
                expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
        close(frequencies(scaling, dim, base), expected)

    def test_longrope(self, dim, base):
        short = [1 + pair / 100 for pair in range(dim // 2)]
        long = [2 + pair for pair in range(dim // 2)]
        scaling = LongRoPE(short, long, 10, 4.0)
        for length, factors in ((1, short), (10, short), (11, long), (40, long)):
            expected = [frequency / factor for frequency, factor in zip(unscaled(dim, base), factors, strict=True)]
            close(frequencies(scaling, dim, base, length), expected)


@pytest.mark.parametrize("scaling", [LinearScaling(1.0), NTK(1.0), YaRN(1.0, 64), Llama3(1.0, 64)], ids=repr)
def test_the_factor_1_changes_nothing(scaling):
    close(frequencies(scaling, 32, 10000.0), unscaled(32, 10000.0))
    assert scaling.magnitude == 1.0


def test_yarn_where_the_stretch_has_no_length():
    """All pairs turn seldom: the stretch is [0, 0], and every pair but the first is divided."""
    plain = unscaled(8, 10000.0)
    close(frequencies(YaRN(4.0, 6), 8, 10000.0), [plain[0], *(frequency / 4 for frequency in plain[1:])])


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        (LinearScaling(4.0), 1.0),
        (NTK(4.0), 1.0),
        (DynamicNTK(4.0, 8), 1.0),
        (Llama3(), 1.0),
        (YaRN(4.0, 64), 0.1 * math.log(4) + 1),
        (YaRN(4.0, 64, attention_factor=1.5), 1.5),
        (LongRoPE((1.0, 1.0), (2.0, 2.0), 64, 4.0), math.sqrt(1 + math.log(4) / math.log(64))),
        (LongRoPE((1.0, 1.0), (2.0, 2.0), 64, 1.0), 1.0),
        (LongRoPE((1.0, 1.0), (2.0, 2.0), 64, 4.0, attention_factor=1.25), 1.25),
    ],
    ids=repr,
)
def test_magnitudes(scaling, magnitude):
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)
    tensor = torch.randn(3, 6, dtype=torch.float64)
    turned = Rotary(4, scaling=scaling).rotate(tensor, torch.arange(3))
    torch.testing.assert_close(turned[:, :4].norm(dim=-1), magnitude * tensor[:, :4].norm(dim=-1))
    assert turned[:, 4:].equal(tensor[:, 4:])


def test_the_weights_of_the_attention_factor():
    assert yarn_attention_factor(40.0) == pytest.approx(0.1 * math.log(40) + 1, rel=1e-12)
    assert yarn_attention_factor(40.0, 0.707) == pytest.approx(0.0707 * math.log(40) + 1, rel=1e-12)
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0


@pytest.mark.parametrize("positions", [torch.tensor([[0, 7], [99, 3]]), torch.tensor([99]), torch.tensor([-500, 99])])
def test_the_largest_position_says_how_long_a_sequence_is(positions):
    for scaling in (DynamicNTK(2.0, 20), LongRoPE((1.0, 1.0), (2.0, 3.0), 20, 2.0)):
        assert scaling.frequencies(4, 100.0, positions).equal(scaling.frequencies(4, 100.0, torch.arange(100)))


def test_no_positions_are_a_short_sequence():
    for scaling in (DynamicNTK(2.0, 20), LongRoPE((1.0, 1.5), (2.0, 3.0), 20, 2.0)):
        nothing = scaling.frequencies(4, 100.0, torch.zeros(2, 0, dtype=torch.int64))
        assert nothing.equal(scaling.frequencies(4, 100.0, torch.arange(5)))


def test_lists_become_part_of_a_value():
    from_lists = LongRoPE([1.0, 1.5], [2.0, 3.0], 20, 2.0)
    assert from_lists == LongRoPE((1.0, 1.5), (2.0, 3.0), 20, 2.0)
    assert hash(from_lists) == hash(LongRoPE((1.0, 1.5), (2.0, 3.0), 20, 2.0))


# Bad input.

WITH_FACTOR = {
    "LinearScaling": LinearScaling,
    "NTK": NTK,
    "DynamicNTK": lambda factor: DynamicNTK(factor, 8),
    "YaRN": lambda factor: YaRN(factor, 8),
    "Llama3": lambda factor: Llama3(factor),
    "LongRoPE": lambda factor: LongRoPE((1.0,), (1.0,), 8, factor),
}
WITH_LENGTH = {
    "DynamicNTK": lambda length: DynamicNTK(2.0, length),
    "YaRN": lambda length: YaRN(2.0, length),
    "Llama3": lambda length: Llama3(2.0, length),
    "LongRoPE": lambda length: LongRoPE((1.0,), (1.0,), length, 2.0),
}


@pytest.mark.parametrize("name", WITH_FACTOR)
@pytest.mark.parametrize("factor", [0.5, 0, -2.0, math.inf, math.nan])
def test_factors_lengthen(name, factor):
    match = f"^{name} needs a factor of 1 or more, how many times longer sequences become; it is {factor!r}$"
    with pytest.raises(ConfigurationError, match=match):
        WITH_FACTOR[name](factor)


@pytest.mark.parametrize("name", WITH_LENGTH)
@pytest.mark.parametrize("length", [0, -8, 8.0, True])
def test_lengths_are_numbers_of_positions(name, length):
    match = f"^{name} needs an original_length of [12] or more, the length in training; it is {length!r}$"
    with pytest.raises(ConfigurationError, match=match):
        WITH_LENGTH[name](length)


def test_longrope_takes_the_logarithm_of_its_length():
    with pytest.raises(ConfigurationError, match="LongRoPE needs an original_length of 2 or more, .* it is 1"):
        WITH_LENGTH["LongRoPE"](1)


@pytest.mark.parametrize("scaling", [NTK(2.0), DynamicNTK(2.0, 8)], ids=repr)
def test_ntk_needs_two_frequencies(scaling):
    match = r"NTK\(factor=2.0.*\) needs a dim of 4 or more: it scales the lowest .* a dim of 2 has only one; Linear"
    with pytest.raises(ConfigurationError, match=match):
        Rotary(2, scaling=scaling)


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (1.0, 2.0), (32.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_yarn_goes_from_fast_to_slow(fast, slow):
    match = f"^YaRN needs 0 < beta_slow < beta_fast; beta_slow is {slow} and beta_fast {fast}$"
    with pytest.raises(ConfigurationError, match=match):
        YaRN(2.0, 8, beta_fast=fast, beta_slow=slow)


@pytest.mark.parametrize(("low", "high"), [(4.0, 4.0), (4.0, 1.0), (0.0, 4.0), (-1.0, 4.0)])
def test_llama3_goes_from_low_to_high(low, high):
    match = (
        "^Llama3 needs 0 < low_frequency_factor < high_frequency_factor; low_frequency_factor is "
        f"{low} and high_frequency_factor {high}$"
    )
    with pytest.raises(ConfigurationError, match=match):
        Llama3(low_frequency_factor=low, high_frequency_factor=high)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_attention_factors_are_above_zero(factor):
    match = f"needs an attention_factor above 0, or None for the published one; it is {factor!r}$"
    with pytest.raises(ConfigurationError, match="^YaRN " + match):
        YaRN(2.0, 8, attention_factor=factor)
    with pytest.raises(ConfigurationError, match="^LongRoPE " + match):
        LongRoPE((1.0,), (1.0,), 8, 2.0, attention_factor=factor)


@pytest.mark.parametrize("name", ["short_factors", "long_factors"])
def test_longrope_has_a_factor_for_each_pair(name):
    factors = {"short_factors": (1.0, 1.0, 1.0), "long_factors": (1.0, 1.0, 1.0)} | {name: (1.0, 1.0)}
    match = f"^LongRoPE needs a factor for each pair of features, 3 where the dim is 6; {name} has 2$"
    with pytest.raises(ConfigurationError, match=match):
        Rotary(6, scaling=LongRoPE(factors["short_factors"], factors["long_factors"], 8, 2.0))


@pytest.mark.parametrize("name", ["short_factors", "long_factors"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_the_factors_of_longrope_are_above_zero(name, wrong):
    factors = {"short_factors": (1.0, 1.0), "long_factors": (1.0, 1.0)} | {name: (1.0, wrong)}
    with pytest.raises(ConfigurationError, match=rf"^LongRoPE needs {name} that are all above 0; they are \(1.0, "):
        LongRoPE(factors["short_factors"], factors["long_factors"], 8, 2.0)
