"""State of the page's view and its permalink: the same names in Python and in the fragment of the URL.

The page's sources have the same list of names; a table of permalinks in the tests checks that both agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote

from ..errors import ConfigurationError
from .atlas import Atlas

MOST_PINS = 6
MOST_KEPT = 32
"""At most so many tokens of each side are kept."""
MOST_TEXT = 200
MOST_READ = 2000
"""A longer text that a model read is not kept in a permalink, since addresses have an end."""
UNQUOTED = "!~*'(),"
"""The characters that JavaScript's encodeURIComponent does not escape, beside letters, digits and "-_."; and commas."""

View = Literal["grid", "head", "lines", "text", "compare", "table"]
Measure = Literal["weight", "contribution"]
Scale = Literal["linear", "sqrt", "log"]
Reduce = Literal["max", "mean"]
Colours = Literal["viridis", "cividis", "magma"]
Theme = Literal["auto", "light", "dark"]
Alignment = Literal["", "argmax", "mutual", "grow-diag", "threshold"]
Direction = Literal["query", "key"]
Mean = Literal["", "layer", "all", "pins", "each"]
Rows = Literal["said", "read"]
Kept = int | tuple[int, ...] | None
"""Kept tokens of one side: one, several, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """State of the view when the page opens. Counts are from 0, and positions are indices of rows and columns.

    Args:
        view: all heads, one head, its lines between tokens, its text, pinned heads beside each other, or a table.
        map: the number of a map of the atlas, or its name; of several of one name it is the first.
        head: of that map.
        mean: in place of the head the mean of all heads of its layer, of all layers of the same kind, or of the pins;
            "each": the lines of each pinned head in its own colour.
        rows: what a row of a translation is called: the token that is said there, or that was read before it.
        frame: (row, column, span) in the middle of the view, and the cells across its shorter side; None: the whole.
        at: what is kept in every view, (query, key): the indices of a pair; None on a side of which nothing is kept, a
            tuple for several tokens. Heads can be put in order by it.
        measure: what colours and lines stand for: weights, or contributions, which are weights times the norms of the
            values; an atlas without these norms shows weights.
        scale: of weights to colours.
        reduce: what a pooled cell shows of its weights.
        normalise: each row by its largest.
        clip: the largest hundredth of the weights gets one colour.
        sight: the colours of a part of a map go up to the largest weight in sight, not to that of the whole map.
        colours: the colour map.
        theme: "auto" is that of the browser.
        alignment: how weights of a translation become links between words; "": no links are marked.
        least: the least weight of a link, with alignment "threshold".
        gold: the links that people made are shown, where there are any.
        words: the tokens of a word are one row and one column.
        hypothesis: the rank of the translation that is shown, of several.
        listed: all translations are listed.
        atlas: which atlas, of several.
        against: the atlas that it is compared with; None: with none.
        text: the text that the model reads, where it can be run on another; "": the one that it has read.
        pins: heads to compare, up to six, (map, head).
        difference: of two pinned heads the difference is shown.
        order: "layer", or a metric or role to sort by; "kept:weight", "kept:contribution", "kept:change" or
            "kept:effect" to sort by what is kept; with a minus before it the greatest first.
        role: only heads that have it; "": all.
        metric: only heads for which this is true, such as "entropy>1.5"; "": all.
        find: tokens that are marked.
        threshold: the least weight that gets a line.
        top: the most lines of a token.
        direction: whether lines are chosen, and a text is shaded, by query or by key.
        hide: sinks and special tokens are left out of a shaded text.
        window: the first query and the first key of lines and text.

    Raises:
        ConfigurationError: a value that is none of these.

    >>> ViewState(view="head", map=2, head=1, frame=(50_000, 49_900, 200)).permalink()
    'view=head&map=2&head=1&frame=50000,49900,200'
    >>> ViewState.from_permalink("http://127.0.0.1:8000/token/#view=lines&top=5").top
    5
    """

    view: View = "grid"
    map: int | str = 0
    head: int = 0
    mean: Mean = ""
    rows: Rows = "said"
    frame: tuple[float, float, float] | None = None
    at: tuple[Kept, Kept] | None = None
    measure: Measure = "weight"
    scale: Scale = "sqrt"
    reduce: Reduce = "max"
    normalise: bool = False
    clip: bool = True
    sight: bool = True
    colours: Colours = "viridis"
    theme: Theme = "auto"
    alignment: Alignment = ""
    least: float = 0.2
    gold: bool = True
    words: bool = False
    hypothesis: int = 0
    listed: bool = False
    atlas: int = 0
    against: int | None = None
    text: str = ""
    pins: tuple[tuple[int, int], ...] = ()
    difference: bool = False
    order: str = "layer"
    role: str = ""
    metric: str = ""
    find: str = ""
    threshold: float = 0.05
    top: int = 3
    direction: Direction = "query"
    hide: bool = False
    window: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name, (needs, holds) in _rules().items():
            value = getattr(self, name)
            if not holds(value):
                raise ConfigurationError(f"the state's {name} is {value!r}; it needs {needs}")

    @classmethod
    def from_permalink(cls, text: str) -> ViewState:
        """Parse the address of a page, or its fragment, the text after "#".

        Raises:
            ConfigurationError: it is none.
        """
        texts: dict[str, str] = {}
        address, sharp, told = text.partition("#")
        if not sharp:
            told = "" if "://" in address else address
        for pair in filter(None, told.split("&")):
            name, equals, value = pair.partition("=")
            if not equals or name not in _rules():
                raise ConfigurationError(
                    f"a permalink has {pair[:40]!r} in it; it needs name=value, of the names {', '.join(_rules())}"
                )
            texts[name] = unquote(value)
        return cls(**{name: _read(name, value) for name, value in texts.items()})

    def permalink(self) -> str:
        """The fragment of the address, the text after "#": all fields that differ from their defaults."""
        told = [(of.name, getattr(self, of.name)) for of in fields(self) if getattr(self, of.name) != of.default]
        return "&".join(f"{name}={quote(_parameter_text(value), safe=UNQUOTED)}" for name, value in told)

    def within(self, atlas: Atlas) -> ViewState:
        """A copy with the index of the map for its name, validated against an atlas.

        Raises:
            ConfigurationError: a map, head, row or column that the atlas does not have.
        """
        names = [of.name for of in atlas.maps]
        if isinstance(self.map, str) and self.map not in names:
            known = ", ".join(dict.fromkeys(names))
            raise ConfigurationError(f"the state's map is {self.map!r}; the atlas has {known[:300]}")
        chosen = names.index(self.map) if isinstance(self.map, str) else self.map
        for of, head in [(chosen, self.head), *self.pins]:
            _check_count("map", of, len(names))
            _check_count(f"head of map {of}", head, atlas.maps[of].heads)
        of = atlas.maps[chosen]
        for side, kept, count in zip(("query", "key"), self.at or (), (of.queries, of.keys), strict=False):
            for index in kept_tokens(kept):
                _check_count(f"chosen {side}", index, count)
        return replace(self, map=chosen)


def opening_permalink(state: ViewState | str | None, atlases: list[Atlas]) -> str:
    """Validate a state or permalink against atlases, and return it as the fragment of the address.

    Raises:
        ConfigurationError: a state that is none, or of something that the atlases do not have.
    """
    if state is None:
        return ""
    state = ViewState.from_permalink(state) if isinstance(state, str) else state
    for which in (state.atlas, state.against or 0):
        _check_count("atlas", which, len(atlases))
    opening = state.within(atlases[state.atlas]).permalink()
    # A translation opens elsewhere where nothing tells how.
    translates = any(of.kind == "cross" for of in atlases[state.atlas].maps)
    return opening or ("view=grid" if translates else "")


def _check_count(what: str, number: int, count: int) -> None:
    if number >= count:
        raise ConfigurationError(f"the state's {what} is {number}; there are {count}, and the first is 0")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_count, value))


def kept_tokens(value: Kept) -> tuple[int, ...]:
    """The kept tokens of one side of `ViewState.at`."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _is_kept(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    sides = [kept_tokens(side) for side in value]
    return any(sides) and all(len(side) <= MOST_KEPT and all(map(_is_count, side)) for side in sides)


def _is_frame(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(map(_is_number, value)) and value[2] > 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_read(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_READ


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT


_COUNT = "a whole number of at least 0"
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: (_COUNT, _is_count),
    int | None: (f"{_COUNT}, or None", lambda value: value is None or _is_count(value)),
    int | str: (f"{_COUNT}, or a name", lambda value: isinstance(value, str) or _is_count(value)),
    str: (f"a text of at most {MOST_TEXT} letters", _is_text),
    float: ("a number between 0 and 1", _is_share),
    tuple[int, int]: ("two whole numbers of at least 0", _is_pair),
    tuple[Kept, Kept] | None: (
        "two of these: a whole number of at least 0, a tuple of such numbers, None; or None",
        lambda value: value is None or _is_kept(value),
    ),
    tuple[float, float, float] | None: (
        "three numbers, row, column and a span above 0, or None",
        lambda value: value is None or _is_frame(value),
    ),
    tuple[tuple[int, int], ...]: (
        f"at most {MOST_PINS} pairs of a map and a head",
        lambda value: isinstance(value, tuple) and len(value) <= MOST_PINS and all(map(_is_pair, value)),
    ),
}
"""By the type of a field: a description of valid values, and the check."""


@cache
def _rules() -> dict[str, tuple[str, Callable[[Any], bool]]]:
    rules = {name: _KINDS.get(kind) or _one_of(get_args(kind)) for name, kind in _types().items()}
    return rules | {"text": (f"a text of at most {MOST_READ:,} letters", _is_read)}


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(ViewState)


def _one_of(choices: tuple[str, ...]) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(map(repr, choices))}", lambda value: isinstance(value, str) and value in choices


def _parameter_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(
            ".".join(map(str, part)) if isinstance(part, tuple) else _parameter_text(part) for part in value
        )
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _read(name: str, text: str) -> Any:
    """Parse a value of a permalink by the type of its name; text that does not parse is left to validation."""
    kind = _types()[name]
    if kind is str or get_origin(kind) is Literal:
        return text
    if kind is bool:
        return {"0": False, "1": True}.get(text, text)
    if name == "pins":
        return tuple(tuple(map(_number, pin.split("."))) for pin in text.split(",") if pin)
    if name == "map":
        return _number(text)
    if name == "at":
        return tuple(_read_kept(side) for side in text.split(","))
    numbers = tuple(_number(part) for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def _read_kept(text: str) -> Any:
    """The kept tokens of one side: "" none, "3" one, "3.7" several."""
    tokens = tuple(_number(part) for part in text.split(".")) if text else (None,)
    return tokens[0] if len(tokens) == 1 else tokens


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
