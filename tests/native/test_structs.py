"""The ctypes structures and constants agree with the C headers: fields by name, order, offset and size."""

import ctypes
import importlib
import re
import shutil
import subprocess

import pytest

from regard.backends.cpu import (
    additive_tiles,
    build,
    few_queries,
    flash_tiles,
    gathered_lists,
    packed_queries,
    panels,
    reduce_tiles,
    short_rows,
    transformer_step,
)

HEADERS = {path.name: path.read_text("utf-8") for path in sorted(build.SOURCES.glob("*.h"))}

SHARED = (
    "additive.h",
    "decode.h",
    "flash.h",
    "gathered.h",
    "gemv.h",
    "gru_decoder.h",
    "mixed_heads.h",
    "packed_matrix.h",
    "paged.h",
    "packed_decode.h",
    "recurrence.h",
    "reductions.h",
    "short.h",
    "threshold.h",
    "top_entries.h",
    "top_products.h",
    "transformer_step.h",
)
"""The headers whose structures Python fills."""


def python_structs() -> dict[str, type[ctypes.Structure]]:
    """The ctypes structures of all modules, by the name that their docstring gives to the C structure."""
    found = {}
    for path in sorted(build.SOURCES.glob("*.py")):
        for value in vars(importlib.import_module(f"regard.backends.cpu.{path.stem}")).values():
            if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure:
                described = re.fullmatch(r"The structure `(\w+)` of (\w+\.h)\.", str(value.__doc__))
                assert described is not None, value
                name, header = described.groups()
                assert f"struct {name} {{" in HEADERS[header]
                found[name] = value
    return found


def c_fields(name: str) -> list[str]:
    """The names of the fields of a C structure, in their order."""
    ((body,),) = [re.findall(rf"struct {name} \{{(.*?)\n\}};", HEADERS[header], re.DOTALL) for header in SHARED
                  if f"struct {name} {{" in HEADERS[header]]  # fmt: skip
    declarations = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(";")
    return [
        re.sub(r"\[\w+\]", "", field).split()[-1].lstrip("*")
        for declaration in declarations
        if declaration.strip()
        for field in declaration.split(",")
    ]


STRUCTS = python_structs()


def test_every_shared_structure_is_in_python():
    declared = {name for header in SHARED for name in re.findall(r"^struct (\w+) \{", HEADERS[header], re.MULTILINE)}
    assert set(STRUCTS) == declared


@pytest.mark.parametrize("name", STRUCTS)
def test_names_and_order(name):
    assert [field[0] for field in STRUCTS[name]._fields_] == c_fields(name)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_offsets_and_sizes(tmp_path):
    expected, lines = [], []
    for name, struct in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
            member = f"((struct {name} *)0)->{field}"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof(struct {name}, {field}), sizeof {member});')
    includes = "".join(f"#include {header}\n" for header in ("<stddef.h>", "<stdio.h>", *map('"{}"'.format, SHARED)))
    (tmp_path / "structs.c").write_text(includes + "int main(void) {" + "\n".join(lines) + "}")
    program = tmp_path / "structs"
    subprocess.run(["cc", "-I", build.SOURCES, tmp_path / "structs.c", "-o", program], check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines() == expected


def test_constants():
    for header, constants in {
        "additive.h": {"STRIP": additive_tiles.STRIP, "BAND": additive_tiles.BAND},
        "decode.h": {"MOST_ROWS": few_queries.MOST_ROWS, "CHUNK": few_queries.CHUNK},
        "gathered.h": {"PIECES_AT_ONCE": gathered_lists.PIECES_AT_ONCE},
        "flash.h": {"BLOCK": flash_tiles.BLOCK, "MOST_BLOCKS": flash_tiles.MOST_BLOCKS},
        "packed_decode.h": {"TOKENS": packed_queries.BLOCK},
        "panels.h": {"PANEL_COLUMNS": panels.PANEL_COLUMNS},
        "byte_panels.h": {"TERMS_OF_WORD": panels.TERMS_OF_WORD, "LARGEST_BYTE": panels.LARGEST_BYTE},
        "short.h": {"LONGEST": short_rows.LONGEST},
    }.items():
        for name, value in constants.items():
            assert re.search(rf"\b{name} = {value}\b", HEADERS[header])
    names = "SOFTMAX", "SIGMOID", "SPARSEMAX", "ENTMAX", "RELU", "SOFTPICK", "STICKS", "LARGEST", "HARD"
    assert f"enum {{ {', '.join(names)} }};" in HEADERS["short.h"]
    assert [getattr(short_rows, name) for name in names] == [*range(len(names))]
    activations = ", ".join(one.name for one in transformer_step.Activation)
    assert f"enum {{ {activations} }};" in HEADERS["transformer_step.h"]


def test_the_table_of_terms():
    (table,) = re.findall(r"#define TERMS\(TERM, POSITION_TERM\) (.*)", HEADERS["reductions.h"])
    named = [(name, kind == "POSITION_TERM") for kind, name in re.findall(r"(\w+)\((\w+)\)", table)]
    assert named == list(reduce_tiles.TERMS.items())
    for term in reduce_tiles.TERMS:
        assert f"lanes term_{term}(" in HEADERS["reduce_tile.h"]
