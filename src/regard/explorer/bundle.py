"""The page's three files, as they ship with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError

FOLDER = Path(__file__).parent / "web"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Markup, script and styles of the page, read once."""

    markup: str
    script: str
    styles: str

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Bundle:
        """The files of a folder.

        Raises:
            ConfigurationError: one of them is not there, or is not text.
        """
        names = "index.html", "explorer.js", "explorer.css"
        try:
            return cls(*((folder / name).read_text(encoding="utf-8") for name in names))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the explorer's page cannot be read ({error}); it is part of the package: install regard anew, or, in "
                "a checkout, run `npm ci && npm run build` in explorer/"
            ) from None
