"""Figures that move: a line `::: steps NAME` of a page becomes a live page in a frame.

NAME is a worked example, or one of the translators that regard comes with, which then translates its own sentence. The
files, one for both languages, are written to figures/ of the site by what `regard steps ... --html FILE` runs: each
opens from a disk, and loads nothing.
"""

import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

from regard.explorer.steps_page import permalink, steps_page
from regard.steps import EXAMPLES
from regard.steps.installed_mechanisms import MECHANISMS
from regard.steps.live_steps import LiveSteps, StepRequest

PLACE = re.compile(r"^::: steps ([a-z_-]+)$", flags=re.MULTILINE)
CAPTIONS = {
    "en": (
        "Change a mask, the score, 1/√d, or a number that is added to a score: what follows from it is marked.",
        "Mask a key: what follows from it is marked.",
        "Open it alone",
        "As a file for slides",
    ),
    "ko": (
        "마스크, 점수 함수, 1/√d, 점수에 더하는 수를 바꿔 보십시오. 그 때문에 달라진 수가 표시됩니다.",
        "키 하나를 가려 보십시오. 그 때문에 달라진 수가 표시됩니다.",
        "따로 열기",
        "슬라이드에 넣을 파일로 만들기",
    ),
}
_named: set[str] = set()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each line of a figure by its frame."""
    language = "ko" if page.file.src_uri.endswith(".ko.md") else "en"
    return PLACE.sub(lambda match: _frame(match.group(1), page.url, language), markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the files of the figures that the pages have named."""
    folder = Path(config["site_dir"]) / "figures"
    folder.mkdir(exist_ok=True)
    live = LiveSteps()
    for name in sorted(_named):
        path = folder / f"{name}.html"
        if not path.exists():  # else the build of the other language has written it
            steps_page(live, request(name)).save(path)


def request(name: str) -> StepRequest:
    """What a figure shows first."""
    if name in MECHANISMS:
        return StepRequest(name, MECHANISMS[name].sentence)
    if not EXAMPLES[name].changes:
        raise ValueError(f"nothing can be changed in the worked example {name!r}: show its tables")
    return StepRequest(f"example:{name}")


def _frame(name: str, url: str, language: str) -> str:
    shown = request(name)
    _named.add(name)
    address = f"{get_relative_url(f'figures/{name}.html', url)}#{permalink(shown, language)}"
    general, masks_alone, alone, for_slides = CAPTIONS[language]
    caption = masks_alone if name in EXAMPLES and "drop" in EXAMPLES[name].changes else general
    of = ["--example", name] if name in EXAMPLES else [shown.sentence, "--score", name]
    command = shlex.join(["regard", "steps", *of, "--html", f"{name}.html"])
    title = (EXAMPLES if name in EXAMPLES else MECHANISMS)[name].title.text(language)
    frame = f'<iframe src="{escape(address)}&amp;frame=1" title="{escape(title)}" loading="lazy"></iframe>'
    return (
        f'<figure class="live">{frame}<figcaption>{caption} <a href="{escape(address)}">{alone}</a>. '
        f"{for_slides}: <code>{escape(command)}</code></figcaption></figure>"
    )
