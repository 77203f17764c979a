"""The explorer in a notebook: the static page inside a frame of its own."""

from __future__ import annotations

import html
from dataclasses import dataclass

from .atlas import Atlas
from .page import StaticPage, static_page

MOST_BYTES = 8_000_000
"""The largest page in a notebook, which keeps it with its outputs."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a notebook displays where it is the last value of a cell."""

    page: StaticPage
    height: int

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.page.text, quote=True)}" sandbox="allow-scripts allow-downloads" '
            f'style="width: 100%; height: {self.height}px; border: 0" title="regard explorer"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<explorer, {self.page.size / 1e6:.1f} MB: {self.page.contents}>"


def show(atlas: Atlas, *, height: int = 640, most: int = MOST_BYTES) -> Shown:
    """An atlas as a notebook displays it, with the contents of `static_page`, `height` pixels high.

    The page is in a sandbox: it has neither the notebook's origin nor its cookies.

    Raises:
        AtlasError: there is no map in the atlas, or it is too large even in the coarsest form.

    >>> import torch
    >>> show(Atlas.from_weights([torch.full((1, 2, 2), 0.5)]))
    <explorer, 0.1 MB: whole weights of 1 map, to within 0.4% of each>
    """
    return Shown(static_page(atlas, most=most), height)
