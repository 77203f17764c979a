"""The bill of materials of a wheel, in CycloneDX 1.6: what it is, what it needs, and what is linked into it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LINKED = {
    "any": {
        "type": "library",
        "name": "zig-compiler-rt",
        "description": "functions that compilers call, such as memcpy, where the system's C library has none",
        "licenses": [{"license": {"id": "MIT"}}],
    },
    "win": {
        "type": "library",
        "name": "mingw-w64-runtime",
        "description": "what starts a DLL, and functions of mathematics",
        "licenses": [{"license": {"id": "ZPL-2.1"}}],
    },
}
"""What the compiler links into the native code: for every system, and for Windows."""


def bill_of_materials(name: str, version: str, tag: str, needed: Sequence[str]) -> dict[str, Any]:
    """The bill of a wheel.

    Args:
        name: that of the distribution.
        version: its version.
        tag: the wheel's platform.
        needed: its requirements, such as "torch>=2.11".

    >>> bill = bill_of_materials("regard", "0.1", "win_amd64", ["numpy>=1.26"])
    >>> [component["name"] for component in bill["components"]]
    ['numpy', 'zig-compiler-rt', 'mingw-w64-runtime']
    """
    own = f"pkg:pypi/{name}@{version}"
    required = [_required(requirement) for requirement in needed]
    linked = [part for system, part in LINKED.items() if system == "any" or tag.startswith(system)]
    linked = [{"bom-ref": part["name"], **part} for part in linked]
    components = [*required, *linked]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "bom-ref": own,
                "type": "library",
                "name": name,
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [{"name": "platform", "value": tag}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _required(requirement: str) -> dict[str, Any]:
    """A component that is installed beside, in a version that pip chooses."""
    name = re.split(r"[<>=!~; \[]", requirement)[0]
    return {
        "bom-ref": f"pkg:pypi/{name}",
        "type": "library",
        "name": name,
        "purl": f"pkg:pypi/{name}",
        "scope": "required",
        "description": f"not in the wheel: {requirement}",
    }
