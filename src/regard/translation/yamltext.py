"""YAML as people mean it: the core schema of YAML 1.2 and no key twice.

PyYAML follows YAML 1.1, where `no` (Norwegian) is False, `1e-3` is a string, `010` is 8, `12:30` is 750 and a date is
an object. Here a plain word is true, false, null or a decimal number if it looks like one, and text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

CORE_SCHEMA = [
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
]
"""Tag, pattern of a plain word that has it, and the characters such a word can start with (NUL: none at all)."""


def _add_core_schema(resolver: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    for tag, pattern, first in CORE_SCHEMA:
        characters = ["" if character == "\0" else character for character in first]
        resolver.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})\\Z"), characters)


class _Loader(yaml.SafeLoader):
    """A safe loader with the core schema, which refuses a key that is there twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (a class attribute by PyYAML's design)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag.endswith(":merge"):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise ConstructorError(
                    None, None, f"the key {key.value!r} is there twice, first in line {first}", key.start_mark
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: ScalarNode) -> int:
        return int(self.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes whatever either version of YAML would take for something other than text."""

    def represent_text(self, value: str) -> ScalarNode:
        # In double quotes all that breaks a line is escaped; PyYAML's other styles lose U+0085, for one.
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_add_core_schema(_Loader)
_add_core_schema(_Dumper)
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def parse(text: str) -> Any:
    r"""The value that the YAML text spells; raises yaml.YAMLError.

    >>> parse("language: no\nrate: 1e-3\nname: 2020-03-14\ncode: 010")
    {'language': 'no', 'rate': 0.001, 'name': '2020-03-14', 'code': 10}
    """
    return yaml.load(text, Loader=_Loader)  # a SafeLoader underneath: builds plain values only


def format(value: Any) -> str:  # noqa: A001 (the module's name says of what)
    r"""The YAML text from which `parse`, and any reader of YAML 1.1 or 1.2, gets the value back.

    >>> format({"language": "no", "rate": 0.001, "name": "1e-3"})
    "language: 'no'\nrate: 0.001\nname: '1e-3'\n"
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
