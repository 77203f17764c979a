"""The explorer as one file: page, styles, script and data, which works from a disk and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import atomic_write
from .atlas import Atlas
from .bundle import Bundle
from .contents import contents_of
from .state import State, start

MOST_BYTES = 32_000_000
"""The largest page that is made unless another size is asked for."""


@dataclass(frozen=True, slots=True)
class StaticPage:
    """One page of HTML with all that it needs, and what of the atlas is in it, in words."""

    text: str
    contents: str

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.text.encode())

    def save(self, path: str | Path) -> None:
        """Write it to one file, which is the old one or the new one, never half of each.

        Raises:
            CheckpointError: it cannot be written.
        """
        with atomic_write(path) as partial:
            partial.write_text(self.text, encoding="utf-8")


def static_page(atlas: Atlas, *, state: State | str | None = None, most: int = MOST_BYTES) -> StaticPage:
    """An atlas as a page of its own, of at most so many bytes.

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
    bundle = Bundle.read()
    fixed = sum(len(part.encode()) for part in (bundle.markup, bundle.script, bundle.styles)) + 1000
    opening = start(state, [atlas])
    contents = contents_of(atlas, max(most - fixed, 0))
    held = {**contents.held, "state": opening} if opening else contents.held
    return StaticPage(_put_together(bundle, held, atlas.title), contents.said())


def _put_together(bundle: Bundle, held: dict[str, Any], title: str) -> str:
    script, styles = bundle.script, bundle.styles
    if "</script" in script.lower() or "<!--" in script or "</style" in styles.lower():
        raise ConfigurationError("the explorer's script or styles cannot stand inside a page; build them anew")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(held, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    shown = html.escape("".join(letter for letter in title if letter.isprintable())[:120])
    page, opening = bundle.markup, '<script type="application/json" id="regard-data">'
    for old, new in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ("<title>regard explorer</title>", f"<title>{shown or 'regard explorer'}</title>"),
        ('<link rel="stylesheet" href="explorer.css">', f"<style>{styles}</style>"),
        (
            '<script type="module" src="explorer.js"></script>',
            f'{opening}{data}</script>\n<script type="module">{script}</script>',
        ),
    ):
        if page.count(old) != 1:
            raise ConfigurationError(f"the explorer's page needs {old} once; it has it {page.count(old)} times")
        page = page.replace(old, new)
    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
