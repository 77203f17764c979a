"""Notebooks of the pages: a line `::: notebook` becomes links to the code of its section as a notebook.

The notebook has the page's formula and the examples of the section, without prompts, and installs regard by pip. It is
written to notebooks/ of the site. Where the environment's REGARD_REPOSITORY, the `repo_url` of mkdocs.yml, is a
repository on GitHub, to which `mkdocs gh-deploy` pushes the site, a link opens the notebook in Colab, and pip installs
regard from that repository; else the page says where a notebook can be uploaded, and pip installs the released regard.
"""

import doctest
import json
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

PLACE = re.compile(r"^::: notebook$", flags=re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"^\$\$.*?\$\$", flags=re.MULTILINE | re.DOTALL)
REPOSITORY = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)/?")
COLAB = "https://colab.research.google.com/"
WORDS = {
    "en": (
        "The same as a notebook, which installs regard by pip and needs nothing else: ",
        "open it in Colab",
        "upload it to a service that runs notebooks, such as Colab",
    ),
    "ko": (
        "같은 코드를 노트북으로 실행할 수 있습니다. pip로 regard를 설치하는 것 말고는 필요한 것이 없습니다: ",
        "Colab에서 열기",
        "노트북을 실행해 주는 서비스(예: Colab)에 올리기",
    ),
}
_written: dict[str, str] = {}


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace the line of a notebook by links to it."""
    if not PLACE.search(markdown):
        return markdown
    name = Path(page.file.src_uri).stem  # scaled-dot-product, scaled-dot-product.ko
    repository = REPOSITORY.fullmatch(config["repo_url"] or "")
    installed = f"git+https://github.com/{repository[1]}" if repository else "regard"
    _written[f"{name}.ipynb"] = json.dumps(notebook(markdown, installed), ensure_ascii=False, indent=1)
    says, opens, uploads = WORDS["ko" if name.endswith(".ko") else "en"]
    address = get_relative_url(f"notebooks/{name}.ipynb", page.url)
    if repository:
        service = f"{COLAB}github/{repository[1]}/blob/{config['remote_branch']}/notebooks/{name}.ipynb", opens
    else:
        service = COLAB, uploads
    links = (f'<a href="{escape(address)}" download>{name}.ipynb</a>', f'<a href="{service[0]}">{service[1]}</a>')
    return PLACE.sub(f"<p>{says}{', '.join(links)}.</p>", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the notebooks of the pages."""
    folder = Path(config["site_dir"]) / "notebooks"
    folder.mkdir(exist_ok=True)
    for name, text in _written.items():
        (folder / name).write_text(text + "\n", "utf-8")


def notebook(markdown: str, installed: str = "regard") -> dict[str, Any]:
    """The notebook of a page, in the format 4 of Jupyter: title, formula, installation, then the section's code.

    A cell of code ends where the page shows a result.

    installed: what pip installs.
    """
    title = re.findall(r"^# (.+)$", markdown, flags=re.MULTILINE)[0]
    section = next(part for part in re.split(r"^## ", markdown, flags=re.MULTILINE) if PLACE.search(part))
    said = PLACE.sub("", BLOCK.sub("", section)).split("\n", 1)[1].strip()
    formula = FORMULA.search(markdown)
    cells = [
        _cell("markdown", "\n\n".join([f"# {title}", *([formula[0]] if formula else []), said])),
        _cell("code", f"%pip install --quiet {installed}"),
        *(_cell("code", source) for source in sources("\n".join(BLOCK.findall(section)))),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def sources(examples: str) -> list[str]:
    r"""The code of doctests, a text for each result that is shown.

    >>> sources(">>> a = 1\\n>>> a\\n1\\n>>> a + 1\\n2\\n")
    ['a = 1\\na', 'a + 1']
    """
    texts, lines = [], []
    for example in doctest.DocTestParser().get_examples(examples):
        lines.append(example.source.rstrip("\n"))
        if example.want:
            texts.append("\n".join(lines))
            lines = []
    return [*texts, *(["\n".join(lines)] if lines else [])]


def _cell(kind: str, source: str) -> dict[str, Any]:
    text = source.splitlines(keepends=True)
    if kind == "markdown":
        return {"cell_type": kind, "metadata": {}, "source": text}
    return {"cell_type": kind, "execution_count": None, "metadata": {}, "outputs": [], "source": text}
