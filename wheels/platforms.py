"""The systems and processors that wheels are made for, each with the tag of its wheel and clang's name for it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Platform(NamedTuple):
    """A system and processor.

    Attributes:
        tag: that of the wheel, as pip compares it with the machine.
        target: what the C compiler calls it, with the oldest C library or system that the code runs on.
        file_format: that of its shared libraries.
    """

    tag: str
    target: str
    file_format: Literal["ELF", "Mach-O", "PE"]

    @property
    def processor(self) -> Literal["x86-64", "aarch64"]:
        """The family of processors."""
        return "aarch64" if self.target.startswith("aarch64") else "x86-64"

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of the native code for it."""
        return ("neonbf16", "neon") if self.processor == "aarch64" else ("avx512bf16", "avx512", "avx2", "plain")


PLATFORMS = (
    Platform("manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "ELF"),
    Platform("manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "ELF"),
    Platform("musllinux_1_1_x86_64", "x86_64-linux-musl", "ELF"),
    Platform("musllinux_1_1_aarch64", "aarch64-linux-musl", "ELF"),
    Platform("macosx_11_0_x86_64", "x86_64-macos.11.0", "Mach-O"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "Mach-O"),
    Platform("win_amd64", "x86_64-windows-gnu", "PE"),
)
