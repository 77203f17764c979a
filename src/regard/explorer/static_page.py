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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import AtlasError, ConfigurationError
from ..utils.atomic_files import atomic_write
from .api import MAX_TILE_SIDE, AtlasAPI, Floats, displayed_weights, head_profile, shortened
from .atlas import Atlas, AttentionMap
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
    """Detail of a page: all weights of maps up to `whole` × `whole`, pooled cells, at most side², of others."""

    whole: int
    side: int

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
    DetailLevel(64, 64),
    DetailLevel(0, 64),
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
    cells: set[tuple[int, int]] = field(default_factory=set)

    def add(self, part: str, key: str, values: Floats) -> None:
        """Add an array, or raise PayloadTooLarge."""
        text = encode_array(values)
        self.payload[part][key] = text
        self.size += _size(key, text)
        if self.size > self.most:
            raise PayloadTooLarge

    def add_if_they_fit(self, part: str, arrays: dict[str, Floats]) -> bool:
        """Add all arrays if they fit, else none; return whether they did."""
        texts = {key: encode_array(values) for key, values in arrays.items()}
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
            parts.append(f"{_counted(others, 'map')} in cells of {finest} weights and more{more}")
        return "; ".join(parts)


def fit_payload(atlas: Atlas, most: int) -> PagePayload:
    """Choose the finest detail of an atlas that fits into so many bytes.

    Raises:
        AtlasError: not even the least fits; there is no map in the atlas.
    """
    meta = AtlasAPI(atlas).meta() | {"exact": f"weights to within {100 * 2.0**-DIGITS:.1f} %", "all": ALL}
    del meta["overview"]
    for depth in DEPTHS:
        weights = sum(of.heads * of.queries * of.keys for of in atlas.maps if depth.takes_whole(of))
        if weights * LEAST_BYTES > most:
            continue
        payload: dict[str, Any] = {"meta": meta, "tokens": [], "pooled": {}, "tiles": {}, "profiles": {}}
        contents = PagePayload(most, payload)
        try:
            for number, of in enumerate(atlas.maps):
                _write(contents, depth, number, of)
        except PayloadTooLarge:
            continue
        _fill(contents, depth, atlas)
        return contents
    heads = sum(of.heads for of in atlas.maps)
    raise AtlasError(
        f"the atlas has {len(atlas.maps)} maps with {heads} heads in all, and even their overviews take more than "
        f"{most / 1e6:,.0f} MB in a page: record fewer layers or shorter texts, or serve it with `regard explore ATLAS`"
    )


def _write(contents: PagePayload, depth: DetailLevel, number: int, of: AttentionMap) -> None:
    contents.payload["tokens"].append(_tokens(contents, of))
    levels = depth.levels(of)
    if depth.takes_whole(of):
        contents.whole += 1
    else:
        contents.cells.add(of.cell(levels[0]))
    for head in range(of.heads):
        for level in levels:
            for reduce in ("max", "mean"):
                contents.add("pooled", f"{number}/{head}/{level}/{reduce}", of.pooled_pairs(head, level, reduce))
        if depth.takes_whole(of):
            for key, values in _tiles(of, number, head):
                contents.add("tiles", key, values)
        for which in contents.payload["meta"]["profiles"]:
            contents.add("profiles", f"{number}/{head}/{which}", head_profile(of, head, which))


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


def _tiles(of: AttentionMap, number: int, head: int) -> Iterator[tuple[str, Floats]]:
    for row in range(-(-of.queries // MAX_TILE_SIDE)):
        for column in range(-(-of.keys // MAX_TILE_SIDE)):
            rows = slice(row * MAX_TILE_SIDE, min((row + 1) * MAX_TILE_SIDE, of.queries))
            columns = slice(column * MAX_TILE_SIDE, min((column + 1) * MAX_TILE_SIDE, of.keys))
            yield f"{number}/{head}/{row}/{column}", displayed_weights(of, head, rows, columns)


def _size(key: str, text: dict[str, Any]) -> int:
    return len(text["data"]) + len(key) + 60


def _tokens(contents: PagePayload, of: AttentionMap) -> dict[str, list[str]]:
    """Tokens of a map; those of the keys are left out if they equal those of the queries."""
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
    for weight by weight, those whose roles are clearest first. The page says what it does not hold. Its policy lets it
    run the script that is in it and nothing else, and load nothing; tokens and names are data to it, never markup.
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
    contents = fit_payload(atlas, max(most - fixed, 0))
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
