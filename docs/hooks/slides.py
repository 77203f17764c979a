"""A view of slides for each lesson of the course: `course/NAME-slides.html` beside the page, plain HTML and CSS.

A slide is what stands below one heading. In a browser each fills the window, and scrolling stops at it; printed, each
is a sheet of A4.
"""

import html
import re
from pathlib import Path
from typing import Any

HEADING = re.compile(r"(?=<h[123][ >])")
PERMALINK = re.compile(r'<a class="headerlink".*?</a>', flags=re.DOTALL)
LINKS = {"en": "Slides of this lesson", "ko": "이 강의의 슬라이드"}
STYLE = """
@page { size: A4 landscape; margin: 12mm }
:root { color-scheme: light dark; --line: #8886 }
html { scroll-snap-type: y proximity }
body { margin: 0; font: clamp(1rem, .6rem + 1.5vw, 1.9rem)/1.45 system-ui, "Noto Sans KR", "Apple SD Gothic Neo",
       "Malgun Gothic", sans-serif }
:lang(ko) { word-break: keep-all; overflow-wrap: break-word }
section { box-sizing: border-box; min-height: 100vh; padding: 5vh 7vw; display: flex; flex-direction: column;
          justify-content: center; scroll-snap-align: start; border-bottom: 1px solid var(--line) }
h1 { font-size: 2em } h2, h3 { font-size: 1.4em } h1, h2, h3 { margin: 0 0 .6em; line-height: 1.2 }
p { margin: .4em 0; max-width: 46em } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .68em;
    line-height: 1.4; margin: .6em 0 }
table { border-collapse: collapse } th, td { border: 1px solid var(--line); padding: .2em .7em; text-align: left }
section:has(iframe) { padding-block: 2vh } figure { margin: .4em 0 } figcaption { font-size: .6em }
iframe { box-sizing: border-box; width: 100%; height: 48vh; border: 1px solid var(--line) }
summary { cursor: pointer; font-weight: 600 }
details:not([open]) { margin-top: .4em } a { color: inherit }
@media print { :root { color-scheme: light } html { font-size: 15pt } section { min-height: 0; height: 180mm; border: 0;
               padding: 0; break-after: page; break-inside: avoid } iframe { height: 95mm } }
"""
_slides: dict[Path, str] = {}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add to a lesson, below its title, the link to its slides."""
    if not is_lesson(page):
        return markdown
    title, rest = markdown.split("\n", 1)
    return f'{title}\n\n<p><a href="{slides_name(page)}">{LINKS[language_of(page)]}</a></p>\n{rest}'


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Keep the slides of a lesson until the site is written."""
    if is_lesson(page):
        target = Path(page.file.abs_dest_path)
        _slides[target.with_name(slides_name(page))] = slides(page.title, content, language_of(page))
    return content


def on_post_build(**_: Any) -> None:
    """Write the slides beside their pages."""
    for path, text in _slides.items():
        path.write_text(text, encoding="utf-8")
    _slides.clear()


def is_lesson(page: Any) -> bool:
    """Whether a page is one of the numbered lessons."""
    return re.match(r"course/\d\d-", page.file.src_uri) is not None


def language_of(page: Any) -> str:
    """The language of a page, by its name."""
    return "ko" if page.file.src_uri.endswith(".ko.md") else "en"


def slides_name(page: Any) -> str:
    """The name of the file of a lesson's slides."""
    return f"{Path(page.file.dest_uri).stem}-slides.html"


def slides(title: str, content: str, language: str) -> str:
    """The page of the slides of a lesson: a section for each heading, which no other idea stands beside."""
    content = PERMALINK.sub("", content)
    content = re.sub(r'<p><a href="[^"]*-slides\.html">.*?</p>', "", content)
    parts = [part.strip() for part in HEADING.split(content)]
    sections = "\n".join(f"<section>{part}</section>" for part in parts if _says_something(part))
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n{sections}\n</main></body>\n</html>\n"
    )


def _says_something(part: str) -> bool:
    """Whether a part has more than a heading: that of the questions has none of its own."""
    return bool(re.sub(r"<h[123].*?</h[123]>", "", part, flags=re.DOTALL).strip())
