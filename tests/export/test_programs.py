"""Exported programs of torch: without regard, saved, compiled ahead of time, and what cannot be exported."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import regard
from regard import biases, masks, normalizers, scores
from regard.errors import ExportError, ShapeError
from regard.export import TensorCache, TensorStep, decompositions
from regard.models import LanguageModel
from regard.models import language_model as lm
from regard.nn import Attention, LinearAttention, Projections

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter

DIM, HEADS = 16, 4
HEAD_AXES = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.function(query, key)


def exported(function: Any, query: Tensor, key: Tensor, *, vary: bool = True) -> torch.export.ExportedProgram:
    shapes = (HEAD_AXES, HEAD_AXES) if vary else None
    return torch.export.export(Called(function), (query, key), dynamic_shapes=shapes)


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def attend(mask: Any = None, **options: Any) -> Any:
    return lambda query, key: regard.attention(query, key, key, mask=mask, **options)


AXES = {
    "one head": ((5, 8), (7, 8)),
    "no heads": ((2, 5, 8), (2, 7, 8)),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8)),
    "broadcast": ((1, 4, 5, 8), (3, 4, 7, 8)),
    "more axes": ((2, 1, 4, 5, 8), (1, 3, 2, 7, 8)),
}


@pytest.mark.parametrize("axes", AXES)
def test_standard_operators_for_any_axes(axes):
    query, key = (torch.randn(shape, dtype=torch.float64) for shape in AXES[axes])
    function = attend(masks.window(before=3), bias=torch.randn(5, 7, dtype=torch.float64))
    standard = exported(function, query, key, vary=False).run_decompositions(decompositions())
    assert "aten.scaled_dot_product_attention.default" in operators(standard)
    assert torch.allclose(standard.module()(query, key), function(query, key), atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks": torch.randn(HEADS)},
        {"normalizer": normalizers.Sigmoid()},
        {"score": scores.Dot()},
        {"bias": biases.alibi(HEADS)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_operator_of_regard_is_left(options):
    query, key = torch.randn(2, HEADS, 37, 8), torch.randn(2, HEADS, 53, 8)
    function = attend(masks.causal(), **options)
    program = exported(function, *(tensor[:, :, :9].clone() for tensor in (query, key)))
    assert "regard.attend.default" in operators(program)
    standard = program.run_decompositions(decompositions())
    assert not any("regard" in name for name in operators(standard))
    assert torch.allclose(program.module()(query, key), function(query, key), atol=1e-6)
    assert torch.allclose(standard.module()(query, key), function(query, key), atol=1e-5)


def test_half_precision_sums_in_float32():
    query, key = (torch.randn(2, HEADS, n, 8).bfloat16() for n in (37, 53))
    standard = exported(attend(masks.causal()), query, key).run_decompositions(decompositions())
    truth = attend(masks.causal())(query.double(), key.double())
    error = (standard.module()(query, key).double() - truth).abs().max()
    assert error <= torch.finfo(torch.bfloat16).eps * truth.abs().max()


def test_a_plain_call_chooses_its_kernel_when_it_runs():
    program = exported(attend(), torch.randn(2, HEADS, 5, 8), torch.randn(2, HEADS, 7, 8))
    assert operators(program) & {"regard.attend.default", "aten.scaled_dot_product_attention.default"} == {
        "regard.attend.default"
    }


def test_a_saved_program_runs_without_regard(tmp_path):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(Projections(DIM, HEADS), mask=masks.from_mod(lambda b, h, q, k: k <= q))
            self.linear = LinearAttention(Projections(DIM, HEADS), causal=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.attention(x))

    model, x = Reader().eval(), torch.randn(3, 67, DIM)
    program = torch.export.export(model, (torch.randn(2, 5, DIM),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    torch.export.save(program.run_decompositions(decompositions()), tmp_path / "standard.pt2")
    with torch.no_grad():
        torch.save({"x": x, "output": model(x)}, tmp_path / "results.pt")
    script = (
        "import sys; sys.modules['regard'] = None\n"
        "import torch\n"
        "results = torch.load('results.pt')\n"
        "output = torch.export.load('standard.pt2').module()(results['x'])\n"
        "print(float((output - results['output']).abs().max()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


def test_a_function_is_not_in_the_file(tmp_path):
    program = exported(
        attend(masks.from_mod(lambda b, h, q, k: k <= q)), torch.randn(2, HEADS, 5, 8), torch.randn(2, HEADS, 5, 8)
    )
    query = torch.randn(2, HEADS, 9, 8)  # the mask is alive, though nobody else holds it
    assert torch.allclose(program.module()(query, query), attend(masks.causal())(query, query), atol=1e-6)
    torch.export.save(program, tmp_path / "own.pt2")
    script = (
        "import torch, regard.linear\n"
        "from regard.errors import ExportError\n"
        "query = torch.randn(2, 4, 9, 8)\n"
        "try:\n"
        "    torch.export.load('own.pt2').module()(query, query)\n"
        "except ExportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Save program.run_decompositions(regard.export.decompositions()) there" in done.stdout, done.stderr


@pytest.mark.slow
def test_compiled_where_inductor_refuses_decompositions(monkeypatch):
    monkeypatch.setenv("CI", "1")
    layer, x = Attention(Projections(DIM, HEADS), mask=masks.causal()), torch.randn(2, 5, DIM)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    expected = regard.linear_attention(q, k, v, causal=True)
    config: Any = torch.compiler.config  # setting an attribute and deleting it again would hide it from torch
    with config.patch(force_disable_caches=True):  # what was compiled before would be taken as it is
        torch.compile(layer)(x).sum().backward()
        assert torch.allclose(torch.compile(regard.linear_attention)(q, k, v, causal=True), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("standard", [False, True])
def test_ahead_of_time(tmp_path, standard):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(Projections(DIM, HEADS), mask=masks.causal() & masks.window(before=3))

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x)

    model, x = Own().eval(), torch.randn(3, 67, DIM)
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.randn(2, 5, DIM),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        )
        if standard:
            program = program.run_decompositions(decompositions())
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "library.pt2"))
        run: Any = torch._inductor.aoti_load_package(path)
        assert torch.allclose(run(x), model(x), atol=1e-6)


@pytest.mark.slow
def test_reduced_overhead():
    model = Attention(Projections(DIM, HEADS), mask=masks.causal() & masks.window(before=3)).eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 67)):
            x = torch.randn(batch, length, DIM)
            assert torch.allclose(compiled(x), model(x), atol=1e-6)


def test_dropout_names_the_module_and_the_mend():
    layers = nn.Sequential(nn.Identity(), Attention(Projections(DIM, HEADS), dropout=0.1))
    program = torch.export.export(layers.train(), (torch.randn(2, 5, DIM),))
    with pytest.raises(ExportError, match=r"module '1' \(regard.nn.attention_layer.Attention\).*Call eval\(\) before"):
        program.run_decompositions(decompositions())


def test_a_mask_that_reads_values_is_named():
    class Counted(masks.Mask):
        def keep(self, grid: Any) -> Any:
            return grid.key <= int(grid.query.sum())

    program = exported(attend(Counted()), torch.randn(2, HEADS, 5, 8), torch.randn(2, HEADS, 5, 8))
    with pytest.raises(ExportError, match=r"cannot be traced without the values of its tensors \(.*Counted"):
        program.run_decompositions(decompositions())


def test_a_formula_of_one_length_is_refused():
    class Looped(masks.Mask):
        def keep(self, grid: Any) -> Any:
            return torch.stack([grid.key[0] <= row for row in range(grid.query.shape[-2])])

    program = exported(attend(Looped()), torch.randn(2, HEADS, 5, 8), torch.randn(2, HEADS, 5, 8))
    with pytest.raises(ExportError, match="it is another graph for each length, and the length may vary"):
        program.run_decompositions(decompositions())


def test_monotonic_attention_is_one_graph_for_each_number_of_queries():
    function = attend(normalizer=normalizers.Monotonic())
    query = torch.randn(2, HEADS, 5, 8)
    program, longer = exported(function, query, query), torch.randn(2, HEADS, 37, 8)
    assert torch.allclose(program.module()(longer, longer), function(longer, longer), atol=1e-6)
    with pytest.raises(ExportError, match="it is another graph for each length"):
        program.run_decompositions(decompositions())


def test_constants_of_a_formula():
    """A mask may make tensors of numbers, and write into those that it has made."""

    class Listed(masks.Mask):
        def keep(self, grid: Any) -> Any:
            kept = grid.key * 0 + grid.query * 0 == 1
            kept[..., 2:4] = True
            return kept | (grid.key == torch.tensor([[0], [1]])[1]) | (grid.query == torch.tensor(3))

    query = torch.randn(2, HEADS, 9, 8)
    function = attend(Listed())
    standard = exported(function, query, query).run_decompositions(decompositions())
    longer = torch.randn(3, HEADS, 37, 8)
    assert torch.allclose(standard.module()(longer, longer), function(longer, longer), atol=1e-6)


def language_model(**attention: Any) -> LanguageModel:
    config = lm.LanguageModelConfig(
        vocabulary_size=20,
        dim=DIM,
        layers=(lm.LayerConfig(before=3), lm.LayerConfig()),
        attention=lm.AttentionConfig(num_heads=HEADS, **attention),
        feed_forward=lm.GatedFeedForwardConfig(24),
    )
    return LanguageModel(config).eval()


def test_steps_over_tensors():
    step = TensorStep(language_model())
    text = torch.randint(20, (3, 11))
    with torch.no_grad():
        past, logits = step.no_past(3), []
        for part in text.split([4, 1, 6], 1):
            found, *past = step(part, *past)
            logits.append(found)
        assert torch.allclose(torch.cat(logits, 1), step.model(text), atol=1e-5)


def test_a_step_with_another_past():
    step = TensorStep(language_model())
    with pytest.raises(ShapeError, match="needs the 4 tensors of `names`, and was given 1"):
        step(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1))


def test_a_cache_of_tensors():
    cache = TensorCache(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 5))
    longer = cache.append(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 5))
    assert longer.next_position == 4
    assert longer.positions.tolist() == [0, 1, 2, 3]
    assert longer.evict() is longer
    assert longer.nbytes == 2 * 4 * (4 + 5) * 4
    assert torch.equal(longer.reorder(torch.tensor([1, 1])).keys[0], longer.keys[1])
    with pytest.raises(ShapeError, match="the new keys have 3"):
        cache.append(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 5))
