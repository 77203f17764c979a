import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
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
def test_the_environment_forbids(unopened, monkeypatch):
    monkeypatch.setenv("REGARD_NATIVE", "off")
    assert not native.available()
    assert native.variants() == ()
    with pytest.raises(KernelError, match="native code cannot be called: .*REGARD_NATIVE is 'off'; unset it"):
        AdditiveScores(torch.randn(1, 2, 3), torch.randn(1, 2, 3), torch.randn(3))


USES = {
    "available": native.available,
    "why_not": native.why_not,
    "variant": native.variant,
    "variants": native.variants,
    "variant_in_use": native.variant_in_use,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_environment_names_no_variant(unopened, monkeypatch, use):
    monkeypatch.setenv("REGARD_NATIVE", "axv2")
    names = ", ".join(build.compiler_flags())
    for _ in range(2):  # not the first use alone
        with pytest.raises(ConfigurationError) as raised:
            use()
        assert str(raised.value) == (
            f"the environment variable REGARD_NATIVE is 'axv2': no variant of that name; there are {names}, and off "
            f"for none of them; or unset it for the fastest"
        )


def test_attention_under_a_mistyped_setting():
    script = (
        "import torch, regard\n"  # which goes well
        "try:\n"
        "    regard.attention(*torch.randn(3, 1, 1, 40, 8))\n"
        "except regard.errors.ConfigurationError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "REGARD_NATIVE": "AVX2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("the environment variable REGARD_NATIVE is 'AVX2': no variant of that name"), (
        done.stderr
    )


@pytest.mark.usefixtures("built")
def test_the_environment_names_a_variant_of_another_processor(unopened, monkeypatch):
    monkeypatch.setattr(build, "compiler_flags", lambda: {"sve": (), build.baseline(): ()})
    monkeypatch.setenv("REGARD_NATIVE", "sve")
    with pytest.raises(ConfigurationError) as raised:
        native.available()
    assert str(raised.value) == (
        f"the environment variable REGARD_NATIVE is 'sve': this processor does not run it; {build.baseline()} can be "
        f"used; or unset it for the fastest"
    )


@pytest.mark.usefixtures("built")
def test_the_environment_names_a_variant_that_was_not_compiled(unopened, monkeypatch):
    opened = library._open(library.FOLDER)
    if len(opened) == 1:
        pytest.skip("this processor runs the baseline alone")
    missing, *others = opened
    monkeypatch.setattr(library, "_open", lambda _: {name: opened[name] for name in others})
    monkeypatch.setenv("REGARD_NATIVE", missing)
    with pytest.raises(ConfigurationError) as raised:
        native.available()
    assert str(raised.value) == (
        f"the environment variable REGARD_NATIVE is {missing!r}: it was not compiled: install regard again with "
        f"REGARD_VARIANTS=all, which compiles every variant; {', '.join(others)} can be used; or unset it for the "
        f"fastest"
    )


def test_the_environment_names_a_variant_where_there_is_no_library(unopened, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setenv("REGARD_NATIVE", build.baseline())
    with pytest.raises(ConfigurationError, match=f"REGARD_NATIVE is '{build.baseline()}': it was never built; install"):
        native.why_not()


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


def with_its_sum(content: bytes, folder: Path) -> None:
    """A library as it is built, whatever it holds."""
    (folder / build.LIBRARY).write_bytes(content)
    (folder / build.CHECKSUM).write_text(f"{hashlib.sha256(content).hexdigest()}  {build.LIBRARY}\n")


def test_built_for_another_system(unopened, monkeypatch, tmp_path):
    with_its_sum(b"MZ and nothing more", tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert "it was built for another system or processor (" in str(native.why_not())


DAMAGE = {
    "cut": lambda library: library[: len(library) // 2],
    "cut by a byte": lambda library: library[:-1],
    "empty": lambda _: b"",
    "text": lambda _: b"not a library\n",
    "one bit": lambda library: library[:5000] + bytes([library[5000] ^ 1]) + library[5001:],
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_not_opened(unopened, monkeypatch, tmp_path, damage):
    for name in (build.LIBRARY, build.CHECKSUM):
        shutil.copy(library.FOLDER / name, tmp_path)
    damaged = damage((tmp_path / build.LIBRARY).read_bytes())
    (tmp_path / build.LIBRARY).write_bytes(damaged)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert native.why_not() == (
        f"{tmp_path / build.LIBRARY} is damaged: its {len(damaged):,} bytes are not those that were built: their sum "
        f"is not that of libregard.so.sha256; install regard again where there is a C compiler: cc, or what $CC names"
    )
    output = regard.attention(*torch.randn(3, 1, 2, 37, 8))
    assert output.isfinite().all()


def test_a_library_without_its_sum(unopened, monkeypatch, tmp_path):
    (tmp_path / build.LIBRARY).write_bytes(b"any")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert str(native.why_not()).startswith(
        f"{tmp_path / build.LIBRARY} is damaged: libregard.so.sha256, which is written with it, is not there; install"
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_another_library_of_that_name(unopened, monkeypatch, tmp_path):
    (tmp_path / "other.c").write_text("int other(void) { return 1; }\n")
    foreign = tmp_path / "foreign.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", foreign, tmp_path / "other.c"], check=True)
    with_its_sum(foreign.read_bytes(), tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert str(native.why_not()).startswith(f"{tmp_path / build.LIBRARY} is not regard's; install")


@pytest.mark.usefixtures("built")
def test_built_for_another_processor(unopened, monkeypatch):
    monkeypatch.setattr(build, "compiler_flags", lambda: {"sve": ()})
    assert str(native.why_not()).startswith("it was built for another processor; install")


@pytest.mark.usefixtures("built")
def test_built_from_other_sources(unopened, monkeypatch, tmp_path):
    for name in (build.LIBRARY, build.CHECKSUM):
        shutil.copy(library.FOLDER / name, tmp_path)
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
