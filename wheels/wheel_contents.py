"""What a wheel holds, read from its bytes on any machine, and what is wrong with it for its platform."""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from platforms import Platform

NATIVE = "regard/backends/cpu"
LIBRARY, CHECKSUM = f"{NATIVE}/libregard.so", f"{NATIVE}/libregard.so.sha256"
MOST_BYTES = 3_000_000
NEWEST_GLIBC = (2, 17)
PROCESSORS = {
    "ELF": {62: "x86-64", 183: "aarch64"},
    "Mach-O": {0x01000007: "x86-64", 0x0100000C: "aarch64"},
    "PE": {0x8664: "x86-64"},
}
"""The numbers of processors in the headers of libraries."""


def format_and_processor(library: bytes) -> tuple[str, str]:
    """The file format of a shared library and the processor that it is for, by its header; "unknown" what is neither.

    >>> format_and_processor(b"no library")
    ('unknown', 'unknown')
    """
    if library[:4] == b"\x7fELF":
        kind, number = "ELF", struct.unpack_from("<H", library, 18)[0]
    elif library[:4] == b"\xcf\xfa\xed\xfe":
        kind, number = "Mach-O", struct.unpack_from("<I", library, 4)[0]
    elif library[:2] == b"MZ" and len(library) > 64:
        kind, number = "PE", struct.unpack_from("<H", library, struct.unpack_from("<I", library, 60)[0] + 4)[0]
    else:
        return "unknown", "unknown"
    return kind, PROCESSORS[kind].get(number, "unknown")


def glibc_versions(library: bytes) -> set[tuple[int, ...]]:
    r"""The versions of glibc whose functions a library for Linux asks for.

    >>> sorted(glibc_versions(b"\0GLIBC_2.2.5\0GLIBC_2.17\0"))
    [(2, 2, 5), (2, 17)]
    """
    found = re.findall(rb"GLIBC_([0-9.]+)\0", library)
    return {tuple(int(part) for part in version.decode().split(".")) for version in found}


def faults(wheel: Path, platform: Platform) -> Iterator[str]:
    """What is wrong with the wheel of a platform; nothing, if it is as it should be."""
    if not wheel.name.endswith(f"-py3-none-{platform.tag}.whl"):
        yield f"its name does not end with -py3-none-{platform.tag}.whl"
    if wheel.stat().st_size > MOST_BYTES:
        yield f"it has {wheel.stat().st_size:,} bytes, above {MOST_BYTES:,}"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        yield from _faults_of_files(names, archive, platform)
        if {LIBRARY, CHECKSUM} <= names:
            library = archive.read(LIBRARY)
            if hashlib.sha256(library).hexdigest() not in archive.read(CHECKSUM).decode():
                yield f"{LIBRARY} is not that of {CHECKSUM}"
            yield from _faults_of_library(library, platform)


def _faults_of_files(names: set[str], archive: zipfile.ZipFile, platform: Platform) -> Iterator[str]:
    about = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    sboms, licenses = f"{about}/sboms/regard.cdx.json", [f"{about}/licenses/{name}" for name in ("LICENSE", "NOTICE")]
    yield from (f"it has no {name}" for name in (LIBRARY, CHECKSUM, sboms, *licenses) if name not in names)
    strange = [name for name in names if not name.startswith(("regard/", "regard_command/", f"{about}/"))]
    strange += [name for name in names if name.endswith((".c", ".h", ".pyc", ".safetensors", "not_built.txt"))]
    yield from (f"it has {name}, which no wheel should" for name in sorted(strange))
    lines = archive.read(f"{about}/WHEEL").decode().splitlines()
    tags = {line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")}
    if tags != {f"py3-none-{tag}" for tag in platform.tag.split(".")}:
        yield f"its tags are {sorted(tags)}, where the platform is {platform.tag}"
    if "Root-Is-Purelib: false" not in lines:
        yield "it says that it is for every platform"


def _faults_of_library(library: bytes, platform: Platform) -> Iterator[str]:
    found = format_and_processor(library)
    if found != (platform.file_format, platform.processor):
        yield f"its library is {' for '.join(found)}, not {platform.file_format} for {platform.processor}"
    for variant in platform.variants:
        if f"regard_flash_{variant}\0".encode() not in library:
            yield f"its library has no functions of the variant {variant}"
    versions = glibc_versions(library)
    if versions and "musl" in platform.tag:
        yield "its library needs glibc, which is not where musl is"
    if versions and max(versions) > NEWEST_GLIBC:
        yield f"its library needs glibc {'.'.join(map(str, max(versions)))}, above {'.'.join(map(str, NEWEST_GLIBC))}"
    if platform.file_format == "ELF" and b".debug_info\0" in library:
        yield "its library holds debugging information"
