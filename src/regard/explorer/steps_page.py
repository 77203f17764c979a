"""The live page of `regard steps` in one file: what a server would compute for a change is in it, computed before."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any
from urllib.parse import urlencode

from ..steps.live_steps import LiveSteps, StepRequest
from .static_page import GZIP, StaticPage, WebBundle, embedded_page

ADDED = (-4, -3, -2, -1, 1, 2, 3, 4)
"""What is added to each score, one at a time, on a page without a server."""
MOST_JOINT = 3
"""Keys of a worked example that are masked at once, on a page without a server."""
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
    that it has no others. Of a worked example it is each query, with `joint_changes` as well.

    Raises:
        CorpusError, ConfigurationError: as `LiveSteps.answer`.
    """
    first = live.answer(request)
    plain = live.answer(replace(request, changes=()))
    requests = _requests(request, plain) if "sentence" in first else _example_requests(request, plain)
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
        "answers": packed_json(answers),
        "opening": permalink(request, language),
    }
    title = f"{first['sentence']} → {first['translation']}" if "sentence" in first else first["title"][language]
    contents = f"{len(answers)} computed walkthroughs"
    if left_out:
        contents += f"; {left_out} that do not fit into {most / 1e6:.0f} MB are left out"
    return StaticPage(embedded_page(steps_bundle(), payload, title), contents)


def packed_json(values: dict[str, Any]) -> str:
    """JSON as text: gzip without a time in it, base64."""
    packer = zlib.compressobj(9, zlib.DEFLATED, GZIP)
    packed = packer.compress(json.dumps(values, ensure_ascii=False).encode()) + packer.flush()
    return base64.b64encode(packed).decode("ascii")


def answer_key(request: StepRequest) -> str:
    """What a page without a server finds an answer by: its word and its change.

    >>> answer_key(StepRequest("dot", "나", word=2, changes=("flip=1",)))
    '2 flip=1'
    """
    return " ".join([str(request.word), *request.changes])


def single_changes(answer: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The single changes of a page without a server: score, scale, each key masked, and numbers added to each score."""
    yield from ((change,) for change in _of_products(answer))
    yield from ((change,) for change in _of_masks(answer))
    if answer["adds"]:
        keys = range(1, len(answer["keys"]) + 1)
        yield from ((f"add={key}:{number}",) for key in keys for number in ADDED)


def joint_changes(answer: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Changes of a worked example of few keys that are made together: up to three masked, and another score or scale.

    They are in the order in which the page writes them: score, scale, keys.
    """
    keys = _of_masks(answer)
    if len(keys) > MOST_JOINT + 1:
        return
    for count in range(1, min(len(keys), MOST_JOINT) + 1):
        for masked in combinations(keys, count):
            yield from ((product, *masked) for product in _of_products(answer))
            if count > 1:
                yield masked


def _of_products(answer: dict[str, Any]) -> list[str]:
    """Other scores, and no 1/√d."""
    return [*(f"score={name}" for name in answer["scores"][1:]), *(["scale=1"] if answer["scaled"] else [])]


def _of_masks(answer: dict[str, Any]) -> list[str]:
    """Each key masked, or no longer."""
    kind = "drop" if answer["drops"] else "flip"
    return [f"{kind}={key}" for key in range(1, len(answer["keys"]) + 1)]


def _example_requests(request: StepRequest, plain: dict[str, Any]) -> Iterator[StepRequest]:
    """Each query of a worked example as it is and with single changes, the requested one first; then joint changes."""
    rows = [request.word, *(row for row in range(1, len(plain["queries"]) + 1) if row != request.word)]
    for row in rows:
        unchanged = replace(request, word=row, changes=())
        yield unchanged
        if request.changes and row == request.word:
            yield request
        others = (changes for changes in (*single_changes(plain), *joint_changes(plain)) if changes != request.changes)
        yield from (replace(unchanged, changes=changes) for changes in others)


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
    """An answer without what it shares with the one of no change; of a table that is the same its key is left.

    Where a table has lost something, such as its example, that is None.
    """
    same = {table["key"]: table for table in trained["tables"]}
    tables = [_table_difference(table, same.get(table["key"], {})) for table in found["tables"]]
    return {**{name: value for name, value in found.items() if trained.get(name) != value}, "tables": tables}


def _table_difference(table: dict[str, Any], before: dict[str, Any]) -> dict[str, Any] | str:
    if table == before:
        return table["key"]
    lost = dict.fromkeys(before.keys() - table.keys())
    return {name: value for name, value in table.items() if name == "key" or before.get(name) != value} | lost
