"""Which kernel computes a problem, in words; a kernel asked for by name never falls back."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch.autograd import forward_ad

import regard
from regard import masks, native, scores
from regard.attention import run_problem
from regard.core.normalizer import RatioNormalizer
from regard.core.torch_modes import generator_restored
from regard.errors import KernelError
from regard.kernels import KERNELS, Cost, make_problem
from regard.kernels.formula import formula
from regard.kernels.planning import choice, signature


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def whole(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two batches and three heads."""
    return rand(2, 3, m, 11), rand(2, 3, n, 11), rand(2, 3, n, 13)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


class TestExplain:
    @pytest.mark.usefixtures("any_processor")
    def test_text(self):
        tensors = (tensor.double() for tensor in whole())
        lines = str(regard.explain(*tensors, mask=masks.causal(), softcap=3.0)).splitlines()
        assert lines[:2] == [
            "attention of 5 queries over 7 keys, weights (2, 3, 5, 7), float64 on cpu",
            "  score: DotPairs   mask: causal()   bias: None",
        ]
        assert [line[:15].strip() for line in lines[2:]] == [
            *("sdpa", "short", "decode", "cpu_flash", "block_sparse", "flex", "decomposed", "gathered", "additive"),
            "tiled",
            "-> reference",
        ]
        assert re.fullmatch(
            r"-> reference    chosen: takes the least time \(about [\d.]+ µs, [\d.]+ KiB beside inputs and output\)",
            lines[-1],
        )

    def test_reasons(self):
        text = str(regard.explain(*whole(), score=scores.Additive(11, 11, 3), softcap=2.0, sinks=rand(3)))
        assert "   sdpa         cannot: torch's operator computes dot products; this score is additive; " in text
        assert "torch's operator has no softcap; torch's operator has no sinks" in text
        assert "   block_sparse cannot: its dense kernel computes dot products; this score is additive; " in text

    @pytest.mark.usefixtures("any_processor")
    def test_what_a_mask_leaves(self):
        mask = masks.causal() & masks.window(before=511)
        query = torch.zeros(1, 1, 1, 8).expand(1, 8, 16384, 8)
        lines = str(regard.explain(query, query, query, mask=mask)).splitlines()
        best = "cpu_flash" if native.available() else "block_sparse"
        fused, chosen = (next(line for line in lines if name in line) for name in ("sdpa", best))
        assert "not chosen: the mask keeps 3% of 16,384 × 16,384 pairs, and this would compute all" in fused
        assert chosen.startswith(f"-> {best:<12} chosen: takes the least time")

    def test_what_a_mask_leaves_of_a_batch_is_a_mean(self):
        query, key = torch.zeros(8, 2, 300, 8), torch.zeros(8, 2, 400, 8)
        text = str(regard.explain(query, key, key, mask=masks.padding([64] * 4 + [320] * 4)))
        assert "the mask keeps 48% of 300 × 400 pairs, and this would compute all" in text

    def test_why_there_is_no_native_code(self, monkeypatch):
        monkeypatch.setattr("regard.backends.cpu.library._found", "it was never built")
        text = str(regard.explain(*whole(), score=scores.Additive(11, 11, 3)))
        assert "   additive     cannot: there is no native code: it was never built" in text

    @pytest.mark.parametrize(
        ("dtype", "said"),
        [
            (torch.float32, ""),
            (torch.bfloat16, r", bfloat16 (multiplied in pairs, summed in float32|widened to float32 in registers)"),
            (torch.float16, ", float16 widened to float32 in registers"),
        ],
        ids=str,
    )
    def test_the_variant_of_the_native_code(self, dtype, said):
        query = torch.zeros(1, 2, 600, 64, dtype=dtype)
        for variant in native.variants():
            with native.using(variant):
                line = next(
                    line for line in str(regard.explain(query, query, query)).splitlines() if "native code" in line
                )
            assert re.fullmatch(rf"  native code: {variant}{said}", line)
            assert ("in pairs" in line) == (dtype == torch.bfloat16 and variant.endswith("bf16"))

    def test_where_second_derivatives_come_from(self):
        query = torch.zeros(1, 1, 5, 8, requires_grad=True)
        assert "second derivatives" not in str(regard.explain(query.detach(), query.detach(), query.detach()))
        lines = [
            str(regard.explain(query, query, query, kernel=name)).splitlines()[-1]
            for name in ("block_sparse", "reference")
        ]
        assert lines == [
            "  second derivatives: the formula's, with all weights in memory",
            "  second derivatives: its own, with all weights in memory",
        ]
        long = query.expand(1, 8, 5, 8).repeat(1, 1, 1000, 1)
        assert "refused, as 200,000,000 pairs are more than 134,217,728; kernel='reference' has them" in str(
            regard.explain(long, long, long)
        )

    def test_asked_for(self):
        text = str(regard.explain(*whole(), kernel="reference"))
        assert "-> reference    chosen: asked for by name" in text
        assert "   sdpa         not asked for" in text

    @pytest.mark.usefixtures("any_processor")
    def test_plain_problems_are_not_compared(self):
        query, small = torch.zeros(1, 1, 9, 8), "short" if native.available() else "sdpa"
        text = str(regard.explain(query, query, query))
        assert f"-> {small:<12} chosen: small, nothing is compared" in text
        large = torch.zeros(1, 1, 1, 8).expand(1, 8, 4096, 8)
        text = str(regard.explain(large, large, large))
        assert "nothing is compared" not in text
        assert "takes the least time" in text

    def test_a_remembered_choice_for_rounded_lengths(self, monkeypatch):
        monkeypatch.setattr(signature, "_choices", {})
        plan = regard.explain(rand(1, 2, 300, 8), rand(1, 2, 310, 8), rand(1, 2, 310, 8), mask=masks.causal())
        (key,) = signature._choices
        slower = next(kernel for kernel in KERNELS if kernel.name == "reference")
        monkeypatch.setattr(signature, "_choices", {key: slower})
        lines = str(
            regard.explain(*(plan.problem.pairs.query, plan.problem.pairs.key), plan.problem.value, mask=masks.causal())
        )
        assert "-> reference    chosen: took the least time for lengths about these" in lines
        assert "not chosen: took longer for lengths about these" in lines

    @pytest.mark.parametrize(("most", "mask"), [(64, ~masks.causal()), (512, None), (512, masks.padding([500]))])
    def test_a_choice_is_not_remembered_beyond_what_a_kernel_computes(self, most, mask):
        for length in (most, most + 1, most + 18):
            query = rand(1, 2, length, 8)
            plan = regard.explain(query, query, query, mask=mask)
            assert not plan.kernel.why_not(plan.problem), length
            expected = regard.attention(query, query, query, mask=mask, kernel="reference")
            close(regard.attention(query, query, query, mask=mask), expected)

    def test_masks_of_equal_fields_share_no_choice(self):
        """Dataclasses of two classes with equal fields have equal hashes."""

        @dataclass(frozen=True)
        class Earlier(masks.Mask):
            stride: int

            def keep(self, grid):
                return grid.key <= grid.query - self.stride

        query = rand(1, 2, 4096, 32)
        assert hash(Earlier(64)) == hash(masks.strided(64))
        assert regard.explain(query, query, query, mask=masks.strided(64)).kernel.name == "decomposed"
        for mask in (Earlier(64), ~Earlier(64), Earlier(64) & masks.causal()):
            regard.attention(query, query, query, mask=~masks.strided(64))
            regard.attention(query, query, query, mask=masks.strided(64) & masks.causal())
            plan = regard.explain(query, query, query, mask=mask)
            assert not plan.kernel.why_not(plan.problem)

    def test_forward_mode(self):
        query = rand(1, 1, 5, 8)
        with forward_ad.dual_level():
            plan = regard.explain(query, query, query)
        assert "-> reference    chosen: has forward-mode derivatives" in str(plan)
        assert "   sdpa         cannot: only kernel='reference' has forward-mode derivatives" in str(plan)

    def test_under_a_transform_the_choice_is_made_later(self):
        texts = []

        def explained(query):
            texts.append(str(regard.explain(query, query, query, mask=masks.causal())))
            return query

        torch.func.vmap(explained)(rand(3, 1, 5, 8))
        assert "-> the choice is made when the compiled or mapped function runs" in texts[0]
        assert texts[0].count("->") == 1

    @pytest.mark.usefixtures("any_processor")
    def test_the_plan_is_what_runs(self):
        query = rand(1, 2, 9, 8)
        assert regard.explain(query, query, query).kernel.name == ("short" if native.available() else "sdpa")
        assert regard.explain(*whole(), score=scores.Additive(11, 11, 3), kernel="tiled").kernel.name == "tiled"

    @pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
    @pytest.mark.usefixtures("any_processor")
    @pytest.mark.parametrize(
        ("batch", "queries", "keys", "dtype", "mask", "name"),
        [
            (1, 1, 60, torch.float32, None, "decode"),
            (1, 1, 60, torch.float32, masks.causal(), "decode"),
            (1, 1, 60, torch.float32, masks.padding([50]), "short"),
            (64, 1, 200, torch.float32, masks.padding([100]), "short"),  # no key behind the spans is read
            (64, 1, 200, torch.float32, masks.where(keep=torch.ones(200, dtype=torch.bool)), "decode"),
            (1, 5, 60, torch.float32, None, "short"),
            (32, 1, 200, torch.float32, None, "decode"),
            (32, 5, 200, torch.float32, masks.causal(), "decode"),
            (1, 1, 20, torch.bfloat16, None, "decode"),
            (1, 1, 60, torch.bfloat16, masks.padding([50]), "decode"),
            (1, 1, 60, torch.float16, masks.causal(), "decode"),
            (8, 16, 200, torch.bfloat16, None, "decode"),
            (8, 17, 200, torch.bfloat16, None, "short"),
        ],
    )
    def test_few_queries_read_keys_as_they_are(self, batch, queries, keys, dtype, mask, name):
        """Keys are laid out for many queries; for each of few they are read from memory."""
        query, key = rand(batch, 8, queries, 64, dtype=dtype), rand(batch, 8, keys, 64, dtype=dtype)
        assert regard.explain(query, key, key, mask=mask).kernel.name == name
        grouped = rand(batch, 16, queries, 64, dtype=dtype)
        assert regard.explain(grouped, key, key, mask=mask).kernel.name == name
        assert regard.explain(query.requires_grad_(), key, key, mask=mask).kernel.name == "short"

    def test_no_random_number_is_drawn(self):
        tensors = whole()
        torch.manual_seed(1)
        regard.explain(*tensors, dropout_p=0.5)
        drawn = torch.rand(3)
        torch.manual_seed(1)
        assert torch.rand(3).equal(drawn)

    def test_a_device_s_generator_is_restored(self, monkeypatch):
        states = {0: 5, 1: 7}

        class Module:
            """The generators of two devices; the state of each is the number of draws."""

            def is_available(self):
                return True

            def get_rng_state(self, device):
                return states[device.index]

            def set_rng_state(self, state, device):
                states[device.index] = state

        monkeypatch.setattr(torch, "get_device_module", lambda device: Module())
        with generator_restored(torch.device("cuda", 1)):
            states[1] += 1
        assert states == {0: 5, 1: 7}

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    def test_no_random_number_is_drawn_on_a_gpu(self):
        tensors = [tensor.cuda() for tensor in whole()]
        before = torch.cuda.get_rng_state()
        regard.explain(*tensors, dropout_p=0.5)
        assert torch.cuda.get_rng_state().equal(before)

    def test_the_plan_drops_what_the_next_call_does(self):
        tensors = whole()
        plan = regard.explain(*tensors, dropout_p=0.5)
        close(plan.run().output, regard.attention(*tensors, dropout_p=0.5))

    def test_nothing_is_computed(self):
        huge = torch.zeros(1, 1, 1, 8).expand(1, 1, 10**7, 8)
        assert regard.explain(huge, huge, huge).problem.weights_shape == (1, 1, 10**7, 10**7)


class TestKernelByName:
    def test_it_is_used(self):
        query, key, value = whole()
        close(
            regard.attention(query, key, value, kernel="reference"),
            regard.attention(query, key, value, kernel="sdpa"),
        )

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"score": scores.Additive(11, 11, 3)}, "this score is additive"),
            ({"softcap": 1.0}, "has no softcap"),
            ({"sinks": torch.zeros(3)}, "has no sinks"),
            ({"dropout_p": 0.1}, "drops weights by a pattern of its own"),
        ],
    )
    def test_it_never_falls_back(self, options, reason):
        with pytest.raises(KernelError, match=f"kernel 'sdpa' cannot compute this: .*{reason}.*regard.explain"):
            regard.attention(*whole(), kernel="sdpa", **options)

    def test_no_lse(self):
        with pytest.raises(KernelError, match=r"kernel 'sdpa' cannot compute this: .*no log-sum-exp"):
            regard.attention_with_lse(*whole(), kernel="sdpa")
        with pytest.raises(KernelError, match="no log-sum-exp"):
            regard.observe(*whole(), regard.lenses.Weights(), kernel="sdpa")

    def test_unknown_name(self):
        with pytest.raises(
            KernelError,
            match=r"there is no kernel 'spda'; did you mean 'sdpa'\? Known: 'additive', 'block_sparse', 'cpu_flash', ",
        ):
            regard.attention(*whole(), kernel="spda")

    @pytest.mark.parametrize(
        ("kernel", "options", "reason"),
        [
            ("block_sparse", {"dropout_p": 0.1}, "its dense kernel drops no weights"),
            ("block_sparse", {"softcap": 1.0}, "its dense kernel has no softcap"),
            ("block_sparse", {"bias": torch.zeros(5, 7, requires_grad=True)}, "gives no gradient to a bias"),
            ("decode", {"score": scores.Additive(11, 11, 3)}, "this score is additive"),
            ("additive", {}, "its code computes additive scores; this score is a dot product"),
        ],
    )
    def test_others_never_fall_back_either(self, kernel, options, reason):
        with pytest.raises(KernelError, match=f"kernel '{kernel}' cannot compute this: .*{reason}.*regard.explain"):
            regard.attention(*whole(), kernel=kernel, **options)

    def test_grouped_is_for_few_queries(self):
        with pytest.raises(KernelError, match="40 of 2 heads are 80 rows for each key head, more than 64"):
            regard.attention(rand(1, 4, 40, 8), rand(1, 2, 40, 8), rand(1, 2, 40, 8), kernel="decode")


class WithoutSinks:
    """The formula of softmax as a kernel that refuses sinks, and masks unless `masks`."""

    def __init__(self, name: str, *, masks: bool):
        self.name, self.masks = name, masks

    def why_not(self, problem):
        reasons = ["it has no sinks"] if problem.sinks is not None else []
        return reasons if self.masks or problem.mask is None else [*reasons, "it has no mask"]

    def cost(self, problem):
        return Cost(flops=1.0, bytes=0.0)

    def run(self, problem):
        return formula(problem)


class Refusing(RatioNormalizer):
    """Softmax by other kernels."""

    name = "refusing"
    kernels = WithoutSinks("simple", masks=False), WithoutSinks("general", masks=True)

    def log_numerator(self, scores):
        return scores


class TestWhereNoKernelCan:
    """A normalizer all of whose kernels refuse a problem; softmax has one that computes any."""

    def problem(self, **options):
        return make_problem(*whole(), **options, normalizer=Refusing())

    def test_the_error_has_the_reasons_of_each(self):
        problem = self.problem(mask=masks.causal(), sinks=torch.zeros(3))
        message = (
            r"no kernel of refusing attention can compute this: simple: it has no sinks, it has no mask; "
            r"general: it has no sinks\. Leave out what they refuse"
        )
        with pytest.raises(KernelError, match=message):
            run_problem(problem)

    def test_the_last_is_checked_under_forward_mode(self):
        with forward_ad.dual_level():
            assert choice.choose(self.problem(mask=masks.causal())).name == "general"
            with pytest.raises(KernelError, match=r"general: it has no sinks\."):
                choice.choose(self.problem(sinks=torch.zeros(3)))

    def test_under_vmap_one_needs_a_backward(self):
        query, key, value = whole()

        def attended(query):
            return run_problem(make_problem(query, key[0], value[0], normalizer=Refusing())).output

        with pytest.raises(KernelError, match="simple: it has no backward of its own, as torch.compile and torch.func"):
            torch.func.vmap(attended)(query)


@pytest.mark.usefixtures("any_processor")
def test_training_in_float16_is_not_computed_by_torch():
    """Its backward pass takes some sixty times as long as its forward pass."""
    for length in (32, 512):
        query = torch.zeros(1, 8, length, 64, dtype=torch.float16, requires_grad=True)
        kernel = regard.explain(query, query, query).kernel.name
        assert kernel in (("short", "cpu_flash") if native.available() else ("tiled", "reference"))


@pytest.mark.usefixtures("any_processor")
def test_as_many_queries_as_keys_are_no_steps_of_decoding():
    """Many sequences of 16 tokens have many keys and values together, but few for each query of a head."""
    if not native.available():
        pytest.skip(native.why_not() or "")
    many, few = torch.zeros(64, 4, 16, 128, dtype=torch.float16), torch.zeros(64, 4, 4, 128, dtype=torch.float16)
    assert choice.uncompared_kernel(make_problem(few, many, many)) is choice.DECODE
    assert choice.uncompared_kernel(make_problem(many, many, many)) is choice.SHORT


def test_few_queries_over_many_values_are_compared():
    """They are few pairs, but reading the values takes longer than whatever stands around it."""
    query, key = torch.zeros(8, 8, 2, 64), torch.zeros(8, 8, 300, 64)
    assert choice.uncompared_kernel(make_problem(query, key, key)) is None
    one = query[:1, :1], key[:1, :1], key[:1, :1]
    assert choice.uncompared_kernel(make_problem(*one)) is choice.PLAIN_KERNEL


def test_without_vector_instructions_small_problems_are_compared():
    if "plain" not in native.variants():
        pytest.skip("the variant plain does not run here")
    query = torch.zeros(1, 8, 32, 64)
    with native.using("plain"):
        assert choice.uncompared_kernel(make_problem(query, query, query, mask=masks.padding([9]))) is None
