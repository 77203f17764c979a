"""The live page of `regard steps` in one file: what a server would compute for a change is in it, computed before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlencode

from ..steps.live_steps import LiveSteps, StepRequest
from .static_page import StaticPage, WebBundle, embedded_page

ADDED = (-4, -3, -2, -1, 1, 2, 3, 4)
"""What is added to each score, one at a time, on a page without a server."""
MOST_ANSWER_BYTES = 6_000_000
"""Answers beyond so many bytes of JSON are left out of a page."""


def steps_bundle() -> WebBundle:
    """Markup, script and styles of the live page."""
    return WebBundle.read(markup="steps.html", name="steps")


def permalink(request: StepRequest | None, language: str = "en") -> str:
    """What stands behind the "#" of the page's address for a request.

    >>> permalink(StepRequest("dot", "나", changes=("flip=1",)), "ko")
    'lang=ko&mechanism=dot&sentence=%EB%82%98&change=flip%3D1'
    """
    pairs = [("lang", language)]
    if request is not None:
        defaults = asdict(StepRequest(request.mechanism))
        pairs.append(("mechanism", request.mechanism))
        for name in ("sentence", "word", "kind", "layer", "head", "source_word"):
            value = getattr(request, name)
            if value != defaults[name]:
                pairs.append((name, "all" if value is None else str(value)))
        pairs += [("change", change) for change in request.changes]
    return urlencode(pairs)


def steps_page(
    live: LiveSteps, request: StepRequest, language: str = "en", *, most: int = MOST_ANSWER_BYTES
) -> StaticPage:
    """A page of one sentence that opens without a server: each word of its translation, and what single changes make.

    Changes are those of `single_changes`, of the requested word first, of the others while there is room. The page says
    that it has no others.

    Raises:
        CorpusError, ConfigurationError: as `LiveSteps.answer`.
    """
    first = live.answer(request)
    requests = [request] if "sentence" not in first else _requests(request, live.answer(replace(request, changes=())))
    answers: dict[str, Any] = {}
    size = left_out = 0
    trained: dict[str, Any] = first
    for one in requests:
        if size > most and one.changes and one != request:
            left_out += 1
            continue
        found = live.answer(one)
        if one.changes:
            found = _difference(found, trained)
        else:
            trained = found
        answers[answer_key(one)] = found
        size += len(json.dumps(found, ensure_ascii=False).encode())
    options = live.options()
    payload = {
        "options": {name: [one for one in options[name] if one["name"] == request.mechanism] for name in options},
        "answers": answers,
        "opening": permalink(request, language),
    }
    title = f"{first['sentence']} → {first['translation']}" if "sentence" in first else first["title"][language]
    contents = f"{len(answers)} computed walkthroughs"
    if left_out:
        contents += f"; {left_out} that do not fit into {most / 1e6:.0f} MB are left out"
    return StaticPage(embedded_page(steps_bundle(), payload, title), contents)


def answer_key(request: StepRequest) -> str:
    """What a page without a server finds an answer by: its word and its change.

    >>> answer_key(StepRequest("dot", "나", word=2, changes=("flip=1",)))
    '2 flip=1'
    """
    return " ".join([str(request.word), *request.changes])


def single_changes(answer: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The single changes of a page without a server: score, scale, each key masked, and numbers added to each score."""
    yield from ((f"score={name}",) for name in answer["scores"][1:])
    if answer["scaled"]:
        yield ("scale=1",)
    keys = range(1, len(answer["keys"]) + 1)
    yield from ((f"flip={key}",) for key in keys)
    yield from ((f"add={key}:{number}",) for key in keys for number in ADDED)


def _requests(request: StepRequest, trained: dict[str, Any]) -> Iterator[StepRequest]:
    """Each word as trained and then changed, the requested word first."""
    words = [request.word, *(word for word in range(1, len(trained["target"]) + 1) if word != request.word)]
    if request.kind == "self":
        words = [request.word]  # the keys are the words so far: changes of another word are others
    for word in words:
        unchanged = replace(request, word=word, changes=())
        yield unchanged
        if request.changes and word == request.word:
            yield request
        for changes in single_changes(trained):
            if changes != request.changes:
                yield replace(unchanged, changes=changes)


def _difference(found: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """An answer without what it shares with the one of no change: tables that are the same are named by their keys."""
    same = {table["key"]: table for table in trained["tables"]}
    tables = [table["key"] if same.get(table["key"]) == table else table for table in found["tables"]]
    return {**{name: value for name, value in found.items() if trained.get(name) != value}, "tables": tables}
