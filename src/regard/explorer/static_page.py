"""Static HTML page of an atlas: markup, styles, script and data in one file that works offline.

`WebBundle` has the built page as it ships with the package. `PagePayload` has as much of an atlas as fits into a number
of bytes: all weights of short maps, pooled cells of long ones, then all weights of the heads whose roles are clearest.
Arrays are written in half precision, through gzip, in base64. The page's source for embedded data reads the same keys.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import AtlasError, ConfigurationError
from ..utils.atomic_files import atomic_write
from .api import MAX_TILE_SIDE, AtlasAPI, Floats, displayed_weights, head_profile, shortened
from .atlas import Atlas, AttentionMap
from .page_places import tiles_in_sight
from .view_state import ViewState, opening_permalink

DIGITS = 8
"""Binary digits of a weight that are written, of the 11 that half precision has: to within 0.4 % of it."""

GZIP = 31
"""For zlib: in the frame of gzip, without a time in it."""


def encode_array(values: Floats, digits: int = DIGITS) -> dict[str, Any]:
    """Encode an array as text: half precision with `digits` binary digits, gzip, base64.

    Digits that are not written compress away. A number v is off by at most |v| · 2^-digits, or
    2^-(14 + digits) where that is more: 2.4e-7 with 8. NaN stays.
    What half precision cannot hold, above 65504, is written in single precision.

    >>> import numpy
    >>> sorted(encode_array(numpy.ones((2, 2), numpy.float32)).items())[1:]
    [('gzip', True), ('type', 'f2')]
    """
    finite = values[np.isfinite(values)]
    if finite.size and float(np.abs(finite).max()) > 65504:
        return _text("f4", values.astype("<f4").tobytes())
    return _text("f2", round_mantissa(values, digits).astype("<f2").tobytes())


def round_mantissa(values: Floats, digits: int = DIGITS) -> NDArray[np.float16]:
    """Round to half precision with so many binary digits.

    >>> import numpy
    >>> round_mantissa(numpy.array([1.0, 1 / 3, 0.0], numpy.float32), 3).tolist()
    [1.0, 0.3125, 0.0]
    """
    dropped = 24 - digits
    singles = np.ascontiguousarray(values, dtype=np.float32)
    bits = singles.view(np.uint32).astype(np.uint64)
    # To the nearest, ties to even; a carry goes on into the exponent, as it should.
    half_up = bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    kept = (half_up >> dropped << dropped).astype(np.uint32).view(np.float32)
    step = 2.0 ** (-13 - digits)  # of what is smaller than the smallest normal number of half precision, 2^-14
    kept = np.where(np.abs(singles) < 2.0**-14, np.rint(singles / step) * step, kept)
    return np.where(np.isfinite(singles), kept, singles).astype(np.float16)


def _text(kind: str, data: bytes) -> dict[str, Any]:
    packed = _packed(data)
    return {"type": kind, "gzip": True, "data": base64.b64encode(packed).decode("ascii")}


SAMPLE = 2**13
"""Bytes, of the middle and of the end, that tell how an array is compressed."""
WORTH = 0.95
"""Matches are looked for where they make the sample this much smaller."""


def _packed(data: bytes) -> bytes:
    """Compress numbers: by Huffman codes of their bytes alone, or with matches where a sample says that these pay.

    Digits of weights repeat by chance alone: to look for matches takes twenty times as long, and gains 0.3 %. Masks,
    and heads most of whose weights are next to 0, have many.
    """
    middle = len(data) // 2
    sample = data[middle : middle + SAMPLE] + data[-SAMPLE:] if len(data) > 2 * SAMPLE else data
    matched, coded = _deflated(sample, 4, zlib.Z_FILTERED), _deflated(sample, 1, zlib.Z_RLE)
    pays = len(matched) < WORTH * len(coded)
    return _deflated(data, 4, zlib.Z_FILTERED) if pays else _deflated(data, 1, zlib.Z_RLE)


def _deflated(data: bytes, level: int, strategy: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, GZIP, 9, strategy)
    return packer.compress(data) + packer.flush()


ALL = "regard explore ATLAS serves all"
"""The advice on a page that does not contain all weights."""
LEAST_BYTES = 0.3
"""Lower bound on the bytes of a compressed weight: detail levels that exceed the limit by it are not tried."""


@dataclass(frozen=True, slots=True)
class DetailLevel:
    """Detail of a page: all weights of maps up to `whole` × `whole`, pooled cells, at most side², of others.

    profiles: whether it has those of the heads, numbers of each row and column, which of long maps are most of it.
    """

    whole: int
    side: int
    profiles: bool = True

    def takes_whole(self, of: AttentionMap) -> bool:
        """Whether all weights of a map are written."""
        return max(of.queries, of.keys) <= self.whole

    def levels(self, of: AttentionMap) -> list[int]:
        """Pyramid levels that are written; none where one tile has all weights."""
        if self.takes_whole(of):
            return [] if max(of.queries, of.keys) <= MAX_TILE_SIDE else [len(of.levels) - 1]
        return [level for level, shape in enumerate(of.levels) if max(shape) <= self.side]


DEPTHS = (
    DetailLevel(512, 1024),
    DetailLevel(512, 512),
    DetailLevel(256, 256),
    DetailLevel(128, 128),
    DetailLevel(0, 512, profiles=False),
    DetailLevel(0, 256, profiles=False),
    DetailLevel(64, 64),
    DetailLevel(0, 64),
    DetailLevel(0, 64, profiles=False),
)
"""Detail levels in the order in which they are tried; the coarsest pyramid level is always included."""


class PayloadTooLarge(Exception):
    """The payload exceeds its limit in bytes."""


@dataclass(slots=True)
class PagePayload:
    """The JSON data of a static page, with its size in bytes."""

    most: int
    payload: dict[str, Any]
    size: int = 0
    whole: int = 0
    heads: int = 0
    tiles: int = 0
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key, arrays that were written for a finer detail, which was too large; keys differ between parts."""
    cells: set[tuple[int, int]] = field(default_factory=set)
    texts: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = field(default_factory=dict)

    def add(self, part: str, key: str, make: Callable[[], Floats]) -> None:
        """Add the array that `make` returns, or raise PayloadTooLarge."""
        text = self.written.get(key) or encode_array(make())
        self.add_texts(part, {key: text})
        self.written[key] = text

    def add_texts(self, part: str, texts: dict[str, dict[str, Any]]) -> None:
        """Add arrays that are written already, or raise PayloadTooLarge."""
        self.payload[part].update(texts)
        self.size += sum(_size(key, text) for key, text in texts.items())
        if self.size > self.most:
            raise PayloadTooLarge

    def add_if_they_fit(self, part: str, arrays: Mapping[str, Callable[[], Floats]]) -> bool:
        """Add all arrays if they fit, else none; return whether they did."""
        texts = {key: self.written.get(key) or encode_array(make()) for key, make in arrays.items()}
        size = sum(_size(key, text) for key, text in texts.items())
        if self.size + size > self.most:
            return False
        self.payload[part].update(texts)
        self.size += size
        return True

    def summary(self) -> str:
        """The contents in words."""
        others = len(self.payload["meta"]["maps"]) - self.whole
        parts = []
        if self.whole:
            parts.append(f"whole weights of {_counted(self.whole, 'map')}, to within {2.0**-DIGITS:.1%} of each")
        if others:
            finest = " and ".join(f"{rows} × {columns}" for rows, columns in sorted(self.cells))
            more = f", with whole weights of {_counted(self.heads, 'head')} of them" if self.heads else ""
            near = f", and {_counted(self.tiles, 'tile')} of weights around what is shown" if self.tiles else ""
            less = "" if self.payload["meta"]["profiles"] else ", without profiles of rows and columns"
            parts.append(f"{_counted(others, 'map')} in cells of {finest} weights and more{more}{near}{less}")
        return "; ".join(parts)


IN_SIGHT = (0.5, 0.25, 0.125, 0.0)
"""The part of a page that may be weights around what its state shows: the largest that leaves room for all else."""


def fit_payload(atlas: Atlas, most: int, state: ViewState | None = None) -> PagePayload:
    """Choose the finest detail of an atlas that fits into so many bytes, beside the weights that a state shows.

    Raises:
        AtlasError: not even the least fits; there is no map in the atlas.
    """
    meta = AtlasAPI(atlas).meta() | {"exact": f"weights to within {100 * 2.0**-DIGITS:.1f} %", "all": ALL}
    del meta["overview"]
    room = most - len(embedded_json(meta).encode())
    written: dict[str, dict[str, Any]] = {}
    for part in IN_SIGHT[-1:] if state is None else IN_SIGHT:
        sight = {} if state is None else _in_sight(atlas, state, part * room)
        written |= sight
        for depth in DEPTHS:
            contents = PagePayload(room, _empty_payload(meta), written=written)
            if _fits(contents, depth, atlas, sight):
                _fill(contents, depth, atlas)
                return contents
    heads = sum(of.heads for of in atlas.maps)
    raise AtlasError(
        f"the atlas has {len(atlas.maps)} maps with {heads} heads in all, and even their overviews take more than "
        f"{most / 1e6:,.3g} MB in a page: record fewer layers or shorter texts, or serve it with `regard explore ATLAS`"
    )


def _empty_payload(meta: dict[str, Any]) -> dict[str, Any]:
    return {"meta": meta, "tokens": [], "pooled": {}, "tiles": {}, "profiles": {}}


def _fits(contents: PagePayload, depth: DetailLevel, atlas: Atlas, sight: dict[str, dict[str, Any]]) -> bool:
    """Add the tiles in sight and all maps in this detail; whether they fit."""
    weights = sum(of.heads * of.queries * of.keys for of in atlas.maps if depth.takes_whole(of))
    if weights * LEAST_BYTES > contents.most:
        return False
    named = {key: text for key, text in sight.items() if not depth.takes_whole(atlas.maps[int(key.split("/")[0])])}
    contents.tiles = len(named)
    if named:
        contents.payload["meta"] = {**contents.payload["meta"], "around": True}
    if not depth.profiles:
        contents.payload["meta"] = {**contents.payload["meta"], "profiles": []}
    try:
        contents.add_texts("tiles", named)
        for number, of in enumerate(atlas.maps):
            _write(contents, depth, number, of)
    except PayloadTooLarge:
        return False
    return True


def _in_sight(atlas: Atlas, state: ViewState, most: float) -> dict[str, dict[str, Any]]:
    """The tiles that a state shows, written, while they fit."""
    written: dict[str, dict[str, Any]] = {}
    size = 0
    for number, head, row, column in tiles_in_sight(atlas, state):
        of, key = atlas.maps[number], f"{number}/{head}/{row}/{column}"
        if key in written:
            continue
        written[key] = encode_array(_tile(of, head, row, column))
        size += _size(key, written[key])
        if size > most:
            del written[key]
            break
    return written


def _write(contents: PagePayload, depth: DetailLevel, number: int, of: AttentionMap) -> None:
    contents.payload["tokens"].append(_tokens(contents, number, of))
    levels = depth.levels(of)
    if depth.takes_whole(of):
        contents.whole += 1
    else:
        contents.cells.add(of.cell(levels[0]))
    for head in range(of.heads):
        for level in levels:
            for reduce in ("max", "mean"):
                make = partial(of.pooled_pairs, head, level, reduce)
                contents.add("pooled", f"{number}/{head}/{level}/{reduce}", make)
        if depth.takes_whole(of):
            for key, make in _tiles(of, number, head):
                contents.add("tiles", key, make)
        for which in contents.payload["meta"]["profiles"]:
            contents.add("profiles", f"{number}/{head}/{which}", partial(head_profile, of, head, which))


def _fill(contents: PagePayload, depth: DetailLevel, atlas: Atlas) -> None:
    """Add all weights of single heads while they fit, those with the clearest roles first."""
    heads = [
        (-max((float(role["score"]) for role in of.roles[head]), default=0.0), number, head)
        for number, of in enumerate(atlas.maps)
        if not depth.takes_whole(of) and DEPTHS[0].takes_whole(of)
        for head in range(of.heads)
    ]
    for _, number, head in sorted(heads):
        if not contents.add_if_they_fit("tiles", dict(_tiles(atlas.maps[number], number, head))):
            return
        contents.heads += 1


def _tiles(of: AttentionMap, number: int, head: int) -> Iterator[tuple[str, Callable[[], Floats]]]:
    """By their keys, the tiles of a head, to be computed."""
    for row in range(-(-of.queries // MAX_TILE_SIDE)):
        for column in range(-(-of.keys // MAX_TILE_SIDE)):
            yield f"{number}/{head}/{row}/{column}", partial(_tile, of, head, row, column)


def _tile(of: AttentionMap, head: int, row: int, column: int) -> Floats:
    """The weights of one tile, cut at the edges of the map."""
    rows = slice(row * MAX_TILE_SIDE, min((row + 1) * MAX_TILE_SIDE, of.queries))
    columns = slice(column * MAX_TILE_SIDE, min((column + 1) * MAX_TILE_SIDE, of.keys))
    return displayed_weights(of, head, rows, columns)


def _size(key: str, text: dict[str, Any]) -> int:
    return len(text["data"]) + len(key) + 60


def _tokens(contents: PagePayload, number: int, of: AttentionMap) -> dict[str, list[str]] | int:
    """Tokens of a map, or the number of an earlier map that has the same; those of keys only if they are others."""
    texts = (of.query_tokens, of.key_tokens)
    earlier = contents.texts.setdefault(texts, number)
    if earlier != number:
        return earlier
    tokens = {"query": [shortened(word) for word in of.query_tokens]}
    if of.key_tokens != of.query_tokens:
        tokens["key"] = [shortened(word) for word in of.key_tokens]
    contents.size += sum(len(word.encode()) + 3 for words in tokens.values() for word in words)
    if contents.size > contents.most:
        raise PayloadTooLarge
    return tokens


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


FOLDER = Path(__file__).parent / "web"


@dataclass(frozen=True, slots=True)
class WebBundle:
    """Markup, script and styles of the page, as built from its sources."""

    markup: str
    script: str
    styles: str
    name: str = "explorer"

    @classmethod
    def read(cls, folder: Path = FOLDER, *, markup: str = "index.html", name: str = "explorer") -> WebBundle:
        """Read the three files from a folder; script and styles are NAME.js and NAME.css.

        Raises:
            ConfigurationError: one of them is not there, or is not text.
        """
        page, script, styles = (built_file(file, folder) for file in (markup, f"{name}.js", f"{name}.css"))
        return cls(page, script, styles, name)


def built_file(name: str, folder: Path = FOLDER) -> str:
    """One of the files that are built from explorer/.

    Raises:
        ConfigurationError: it is not there, or is not text.
    """
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the explorer's page cannot be read ({error}); it is part of the package: install regard anew, or, in "
            "a checkout, run `npm ci && npm run build` in explorer/"
        ) from None


MOST_BYTES = 32_000_000
"""The largest page that is made unless another size is asked for."""


@dataclass(frozen=True, slots=True)
class StaticPage:
    """A self-contained HTML page, and a description of what it contains."""

    text: str
    contents: str

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.text.encode())

    def save(self, path: str | Path) -> None:
        """Write the page to a file, replaced atomically.

        Raises:
            CheckpointError: it cannot be written.
        """
        with atomic_write(path) as partial:
            partial.write_text(self.text, encoding="utf-8")


def static_page(atlas: Atlas, *, state: ViewState | str | None = None, most: int = MOST_BYTES) -> StaticPage:
    """Make a self-contained HTML page of an atlas, of at most `most` bytes.

    Maps of at most 512 rows and columns are in it weight by weight, each to within 0.4 %; longer ones, or all where
    that is too much, by the levels of their pyramids, as fine as there is room, and then as many heads as there is room
    for weight by weight, those whose roles are clearest first. Of long maps it has the weights around what a state
    shows: what is kept, for all heads, its frame and its window. The page says what it does not hold. Its policy lets
    it run the script that is in it and nothing else, and load nothing; tokens and names are data to it, never markup.
    It opens with a state, or as a permalink tells, unless there is another permalink in its address.

    Raises:
        AtlasError: there is no map in the atlas, or it is too large even in the coarsest form.
        ConfigurationError: a state that is none, or of something that the atlas does not have.

    >>> import torch
    >>> page = static_page(Atlas.from_weights([torch.full((1, 2, 2), 0.5)], tokens=["<b>", "a"]))
    >>> page.contents, "<b>" in page.text
    ('whole weights of 1 map, to within 0.4% of each', False)
    """
    bundle = WebBundle.read()
    fixed = sum(len(part.encode()) for part in (bundle.markup, bundle.script, bundle.styles)) + 1000
    opening = opening_permalink(state, [atlas])
    shown = ViewState.from_permalink(opening).within(atlas) if opening else None
    contents = fit_payload(atlas, max(most - fixed, 0), shown)
    payload = {**contents.payload, "state": opening} if opening else contents.payload
    return StaticPage(embedded_page(bundle, payload, atlas.title), contents.summary())


def embedded_page(bundle: WebBundle, payload: dict[str, Any], title: str) -> str:
    """The bundle with its data in one file of HTML, whose policy lets it run its script and load nothing.

    Raises:
        ConfigurationError: the bundle is not as it is built.
    """
    name, script, styles = bundle.name, bundle.script, bundle.styles
    policy = content_policy([script], [styles])
    data = embedded_json(payload)
    shown = html.escape("".join(letter for letter in title if letter.isprintable())[:120])
    page, opening = bundle.markup, '<script type="application/json" id="regard-data">'
    for old, new in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        (f"<title>regard {name}</title>", f"<title>{shown or f'regard {name}'}</title>"),
        (f'<link rel="stylesheet" href="{name}.css">', f"<style>{styles}</style>"),
        (
            f'<script type="module" src="{name}.js"></script>',
            f'{opening}{data}</script>\n<script type="module">{script}</script>',
        ),
    ):
        if page.count(old) != 1:
            raise ConfigurationError(f"the explorer's page needs {old} once; it has it {page.count(old)} times")
        page = page.replace(old, new)
    return page


def content_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The Content-Security-Policy of a page that runs these scripts, has these styles, and loads nothing.

    Raises:
        ConfigurationError: one of them would end the element that it stands in.
    """
    if any("</script" in one.lower() or "<!--" in one for one in scripts) or any(
        "</style" in s.lower() for s in styles
    ):
        raise ConfigurationError("the explorer's script or styles cannot stand inside a page; build them anew")
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def embedded_json(payload: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
