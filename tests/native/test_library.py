import shutil

import pytest
import torch

from regard import native
from regard.backends.cpu import build, library
from regard.backends.cpu.additive_tiles import AdditiveScores
from regard.backends.cpu.library import DTYPES
from regard.core.finite import all_finite
from regard.errors import ConfigurationError, KernelError


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has yet to be looked for; afterwards all is as before."""
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.delenv(library.SETTING, raising=False)


@pytest.mark.usefixtures("built")
def test_the_fastest_variant_is_in_use(unopened):
    assert native.why_not() is None
    assert native.variant() == native.variants()[0]
    assert set(native.variants()) <= set(build.compiler_flags())
    assert build.baseline() in native.variants()


@pytest.mark.usefixtures("built")
def test_products_of_pairs_are_used_where_they_are_faster(unopened, monkeypatch):
    speeds = {name: found.pair_speed() for name, found in library._open(library.FOLDER).items()}
    paired = [name for name, speed in speeds.items() if speed]
    if not paired:
        pytest.skip("this processor has no instruction for products of pairs")
    monkeypatch.setattr(library, "WORTHWHILE_PAIRS", 0.0)
    assert next(iter(library._open(library.FOLDER))) == paired[0]
    monkeypatch.setattr(library, "WORTHWHILE_PAIRS", 100.0)
    assert [*library._open(library.FOLDER)][1] == paired[0]
    assert 0.1 < speeds[paired[0]] < 8


@pytest.mark.usefixtures("built")
def test_another_variant_for_a_while():
    before = native.variant()
    with native.using(build.baseline()):
        assert native.variant() == build.baseline()
    assert native.variant() == before
    with (
        pytest.raises(ConfigurationError, match=r"the variant 'avx9' .* does not run here; these do: \("),
        native.using("avx9"),
    ):
        pass


@pytest.mark.usefixtures("built")
def test_the_environment_names_the_variant(unopened, monkeypatch):
    monkeypatch.setenv("REGARD_NATIVE", build.baseline())
    assert native.variant() == build.baseline()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("value", "reason"),
    [("off", "REGARD_NATIVE is 'off'; unset it"), ("avx9", r"REGARD_NATIVE is 'avx9', which does not run here; \['")],
)
def test_the_environment_forbids(unopened, monkeypatch, value, reason):
    monkeypatch.setenv("REGARD_NATIVE", value)
    assert not native.available()
    assert native.variants() == ()
    with pytest.raises(KernelError, match=f"native code cannot be called: .*{reason}"):
        AdditiveScores(torch.randn(1, 2, 3), torch.randn(1, 2, 3), torch.randn(3))


def test_never_built(unopened, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert native.why_not() == (
        "it was never built; install regard again where there is a C compiler: cc, or what $CC names"
    )
    with pytest.raises(ConfigurationError, match=r"does not run here; these do: \(\)"), native.using("plain"):
        pass


def test_no_compiler_when_it_was_installed(unopened, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    build.build(tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert str(native.why_not()).startswith(
        "when regard was installed, no C compiler was found: no-such-compiler: No such file or directory; install"
    )


def test_built_for_another_system(unopened, monkeypatch, tmp_path):
    (tmp_path / build.LIBRARY).write_bytes(b"MZ and nothing more")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert "it was built for another system or processor (" in str(native.why_not())


@pytest.mark.usefixtures("built")
def test_built_for_another_processor(unopened, monkeypatch):
    monkeypatch.setattr(build, "compiler_flags", lambda: {"sve": ()})
    assert str(native.why_not()).startswith("it was built for another processor; install")


@pytest.mark.usefixtures("built")
def test_built_from_other_sources(unopened, monkeypatch, tmp_path):
    shutil.copy(library.FOLDER / build.LIBRARY, tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "digest", lambda: "0" * 16)
    assert str(native.why_not()).startswith("it was built from other sources than these; install")


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(1, 2),
    "part of the columns": lambda tensor: tensor[..., 1:6],
    "every second column": lambda tensor: tensor[..., ::2],
    "expanded": lambda tensor: tensor[:, :, :1].expand(-1, -1, 5, -1),
    "two axes, with gaps": lambda tensor: tensor[0, 0, :, 1:6],
    "one number": lambda tensor: tensor[0, 0, 0, 2],
}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_all_finite(dtype, layout, value):
    tensor = torch.full((2, 3, 4, 8), torch.finfo(dtype).max / 512, dtype=dtype)  # whose sum is finite
    if value is not None:
        tensor[0, 0, 0, 2] = value
        assert not all_finite(LAYOUTS[layout](tensor))
        assert not all_finite(torch.zeros(3), LAYOUTS[layout](tensor))
        assert all_finite(tensor[1], tensor[0, 0, 0, 3:])
    else:
        assert all_finite(LAYOUTS[layout](tensor), tensor)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("variant", native.variants())
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_each_entry_is_read_by_each_variant(variant, count):
    with native.using(variant):
        for dtype in DTYPES:
            tensor = torch.zeros(count + 1, dtype=dtype)
            tensor[count] = float("inf")
            assert all_finite(tensor[:count])
            assert not all_finite(tensor)
