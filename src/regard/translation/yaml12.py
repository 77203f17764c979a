"""Read and write YAML 1.2 with the core schema; repeated keys and documents that explode by aliases are refused.

PyYAML follows YAML 1.1, where `no` (Norwegian) is False, `1e-3` is a string, `010` is 8, `12:30` is 750 and a date is
an object. Here a plain word is true, false, null or a decimal number if it looks like one, and text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MOST_VALUES = 100_000
"""Values in a document, those behind an alias counted as often as it is used."""
DEEPEST = 100
"""Collections within each other."""

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
    """A safe loader with the core schema, which refuses repeated keys and documents that are large only by aliases."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (a class attribute by PyYAML's design)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._extents: dict[Node, tuple[int, int]] = {}  # of each node: its values, and how deep they are nested
        self._depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Compose a node, and refuse one that is too large before values are built from it."""
        self._depth += 1
        if self._depth > DEEPEST:
            self._refuse(f"collections are nested deeper than {DEEPEST} times", self.peek_event().start_mark)
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._extents:
            self._refuse("the alias stands within the value that it names", mark)
        values, depth = self._extents.setdefault(node, self._extent(node))
        if values > MOST_VALUES or depth > DEEPEST:
            self._refuse(
                f"with its aliases written out, this has more than {MOST_VALUES:,} values, or is nested deeper than "
                f"{DEEPEST} times",
                mark,
            )
        return node

    def _extent(self, node: Node) -> tuple[int, int]:
        children: list[Node] = []
        if isinstance(node, MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, SequenceNode):
            children = node.value
        extents = [self._extents[child] for child in children]
        return 1 + sum(values for values, _ in extents), 1 + max((depth for _, depth in extents), default=0)

    def _refuse(self, problem: str, mark: yaml.Mark) -> None:
        raise ConstructorError(None, None, problem, mark)

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
        text = self.construct_scalar(node)
        try:
            return int(text)
        except ValueError:
            shown = repr(text) if len(text) <= 20 else f"{text[:20]!r}..."
            raise ConstructorError(None, None, f"{shown} is not a number that can be used", node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes every text that YAML 1.1 or 1.2 would read as another type."""

    def represent_text(self, value: str) -> ScalarNode:
        # In double quotes all that breaks a line is escaped; PyYAML's other styles lose U+0085, for one.
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_add_core_schema(_Loader)
_add_core_schema(_Dumper)
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def parse(text: str) -> Any:
    r"""The value of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML, has a key twice, or is nested or repeated by aliases beyond all use.

    >>> parse("language: no\nrate: 1e-3\nname: 2020-03-14\ncode: 010")
    {'language': 'no', 'rate': 0.001, 'name': '2020-03-14', 'code': 10}
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader underneath: builds plain values only
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConstructorError(None, None, f"a value does not fit its tag: {error}", None) from None


def dump(value: Any) -> str:
    r"""The YAML text of a value, which `parse` and any reader of YAML 1.1 or 1.2 read back.

    >>> dump({"language": "no", "rate": 0.001, "name": "1e-3"})
    "language: 'no'\nrate: 0.001\nname: '1e-3'\n"
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
