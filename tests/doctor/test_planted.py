"""The planted mistakes: where they are listed to be, and of some that they are mistakes and that mending them helps."""

import contextlib
import importlib.util
import io
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("own_registrations")
PLANTED = Path(__file__).parent / "planted"
MISTAKES: list[dict[str, Any]] = tomllib.loads((PLANTED / "mistakes.toml").read_text())["mistake"]
FILES = sorted(path.name for path in PLANTED.glob("*.py"))
CORRECT = sorted(path.name for path in (PLANTED / "correct").glob("*.py"))


def mended_source(name: str) -> str:
    source = (PLANTED / name).read_text()
    for mistake in MISTAKES:
        if mistake["file"] == name:
            for old, new in mistake.get("mended", []):
                assert source.count(old) == 1, (mistake, old)
                source = source.replace(old, new)
    return source


def load(source: str, name: str) -> ModuleType:
    """The source as a module, without what it prints and warns of."""
    spec = importlib.util.spec_from_loader(f"planted_{name}", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for the module of their class
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, name, "exec"), module.__dict__)
    finally:
        del sys.modules[spec.name]
    return module


def needs_what_it_imports(source: str) -> None:
    for package in ("einops", "lightning", "transformers", "matplotlib"):
        if f"import {package}" in source or f"from {package}" in source:
            pytest.importorskip(package)


def test_there_are_a_hundred_and_correct_code_of_each_style() -> None:
    assert len(MISTAKES) >= 100
    assert {mistake["file"] for mistake in MISTAKES} == set(FILES)
    assert max(sum(mistake["file"] == name for mistake in MISTAKES) for name in FILES) <= 4
    assert sum("mended" in mistake for mistake in MISTAKES) >= 100


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake['file']}:{mistake['line']}")
def test_a_mistake_is_on_a_line_of_its_file(mistake: dict[str, Any]) -> None:
    lines = (PLANTED / mistake["file"]).read_text().splitlines()
    assert lines[mistake["line"] - 1].strip()
    assert set(mistake["found_by"]) <= {"static", "running"}
    assert mistake["found_by"]
    assert mistake["kind"]
    assert mistake["what"]


@pytest.mark.parametrize("name", FILES)
def test_planted_and_mended_files_run(name: str) -> None:
    source = (PLANTED / name).read_text()
    needs_what_it_imports(source)
    load(source, name)
    load(mended_source(name), name)


@pytest.mark.parametrize("name", CORRECT)
def test_correct_files_run(name: str) -> None:
    source = (PLANTED / "correct" / name).read_text()
    needs_what_it_imports(source)
    load(source, name)


def leaks(model: torch.nn.Module, length: int = 12, vocabulary: int = 50) -> bool:
    """Whether a later token changes an earlier output."""
    model.eval()
    tokens = torch.randint(1, vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, 8:] = other[:, 8:] % (vocabulary - 1) + 1
    with torch.no_grad():
        outputs = [model(ids) for ids in (tokens, other)]
    first, second = (out[0] if isinstance(out, tuple) else getattr(out, "logits", out) for out in outputs)
    return not torch.allclose(first[:, :8], second[:, :8], atol=1e-5)


def chunks_differ(step: Callable[..., tuple[torch.Tensor, Any]], x: torch.Tensor, size: int) -> bool:
    """Whether a sequence in chunks with a cache has other results than at once."""
    with torch.no_grad():
        whole, _ = step(x)
        cache, parts = None, []
        for part in x.split(size, dim=1):
            out, cache = step(part, cache)
            parts.append(out)
    return not torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)


def both(name: str) -> tuple[ModuleType, ModuleType]:
    source = (PLANTED / name).read_text()
    needs_what_it_imports(source)
    return load(source, name), load(mended_source(name), name)


def test_a_language_model_without_causal_mask_leaks() -> None:
    wrong, mended = both("bert_style.py")
    assert leaks(wrong.LMHeadLike())
    assert not leaks(mended.LMHeadLike())


def test_mended_decoders_do_not_leak() -> None:
    for name, model in (
        ("textbook_decoder.py", "Decoder"),
        ("nano_gpt_block.py", "GPT"),
        ("modeling_tinyllama.py", "TinyForCausalLM"),
        ("kv_cache_loop.py", "Decoder"),
        ("alibi_model.py", "AlibiModel"),
    ):
        module = both(name)[1]
        made = getattr(module, model)
        assert not leaks(made(module.TinyConfig()) if hasattr(module, "TinyConfig") else made()), name


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("kv_cache_loop.py", "CachedAttention"),
        ("kv_cache_loop.py", "WindowCacheAttention"),
        ("rotary_variants.py", "RotaryCached"),
        ("alibi_model.py", "AlibiAttention"),
    ],
)
def test_mended_caches_compute_chunks_as_the_whole(name: str, layer: str) -> None:
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
    wrong, mended = both(name)
    assert chunks_differ(getattr(wrong, layer)().eval(), x, 7)
    assert not chunks_differ(getattr(mended, layer)().eval(), x, 7)


def test_a_mask_by_heads_in_the_wrong_order_lets_padding_in() -> None:
    x = torch.randn(3, 10, 64, generator=torch.Generator().manual_seed(1))
    padding = torch.arange(10) >= torch.tensor([4, 7, 10])[:, None]
    for module, is_wrong in zip(both("jit_friendly.py"), (True, False), strict=True):
        layer = module.PaddedAttention().eval()
        alone = layer(x[1:2, :7])
        assert torch.allclose(layer(x, padding)[1:2, :7], alone, atol=1e-5) is not is_wrong


def test_a_ring_computes_what_one_process_does() -> None:
    query, key, value = torch.randn(3, 2, 12, 8, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    parts = [list(tensor.split(4, dim=1)) for tensor in (query, key, value)]
    wrong, mended = both("ring_helpers.py")
    assert wrong.ring_attention(*parts).isnan().any()
    assert torch.allclose(mended.ring_attention(*parts), expected, atol=1e-5)


def test_correct_models_are() -> None:
    library = load((PLANTED / "correct" / "library_attention.py").read_text(), "library_attention")
    model = library.GroupedModel().eval()
    assert not leaks(model)
    assert not chunks_differ(model, torch.randint(1, 99, (1, 20)), 3)
    layers = load((PLANTED / "correct" / "torch_transformer.py").read_text(), "torch_transformer")
    assert not leaks(layers.CausalEncoder())
    pytest.importorskip("transformers")
    hf = load((PLANTED / "correct" / "modeling_compact.py").read_text(), "modeling_compact")
    assert not leaks(hf.CompactForCausalLM(hf.CompactConfig()))
    elsewhere = load((PLANTED / "correct" / "softmax_elsewhere.py").read_text(), "softmax_elsewhere")
    query, key, value = torch.randn(3, 2, 200, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(elsewhere.streamed(query, key, value), expected, atol=1e-5)
