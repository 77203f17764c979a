"""The extra of regard that each optional package belongs to, for the message when one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "anywidget": "notebook",
    "babel": "demo",
    "libcst": "doctor",
    "lightning": "translation",
    "matplotlib": "plots",
    "pydantic": "translation",
    "rich": "translation",
    "sacrebleu": "translation",
    "safetensors": "translation",
    "starlette": "explorer",
    "tensorboard": "translation",
    "tokenizers": "translation",
    "typer": "translation",
    "uvicorn": "explorer",
    "yaml": "translation",
}
"""By the name that is imported."""


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Turn "No module named ..." into the name of the extra to install, where the package belongs to one.

    Raises:
        MissingExtra: an import within the block failed for want of an optional package.

    >>> with naming_the_extra():
    ...     raise ModuleNotFoundError("No module named 'gone'", name="gone")
    Traceback (most recent call last):
    ModuleNotFoundError: No module named 'gone'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in EXTRAS:
            from regard.errors import require

            require(package, extra=EXTRAS[package])
        raise
