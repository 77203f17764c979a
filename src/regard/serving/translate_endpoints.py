"""Endpoints in LibreTranslate's form: /translate, /languages; a translation may come with its alignment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RegardError
from ..explorer.asgi_app import GONE
from ..explorer.request_guard import json_response
from ..translation.translator import AlignedPair
from .api_errors import RequestError, checked, read_body, validated
from .batch_worker import ModelFailed
from .client_watch import unless_gone
from .limits import ServingLimits
from .translation_worker import TranslatedLine, TranslationWorker

NAMES = {"de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian", "ko": "Korean"}
"""Names of languages; of any other the code."""


class AlignmentAsked(BaseModel):
    """`"attention"` of a request: links of words, the largest weights of each token, the entropy of its weights."""

    model_config = ConfigDict(extra="forbid", strict=True)

    alignment: bool = True
    top: int = Field(default=0, ge=0, le=64)
    entropy: bool = False


class TranslationAsked(BaseModel):
    """A request of /translate, in LibreTranslate's form; `attention` is ours."""

    model_config = ConfigDict(extra="forbid")

    q: str | list[str]
    source: str
    target: str
    format: Literal["text"] = "text"
    alternatives: int = Field(default=0, ge=0, le=16)
    api_key: str | None = None
    attention: AlignmentAsked | None = None


@dataclass(frozen=True, eq=False)
class TranslateEndpoints:
    """Translate lines from one language into another."""

    languages: tuple[str, str]
    worker: TranslationWorker
    limits: ServingLimits

    async def translate(self, request: Request) -> Response:
        """POST /translate, as JSON or as a form."""
        body = await read_body(request, self.limits.body)
        if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            asked = validated(dict(parse_qsl(body.decode("utf-8", "replace"))), TranslationAsked)
        else:
            asked = checked(body, TranslationAsked)
        lines = self._lines(asked)
        work = self.worker.translate(lines, 1 + asked.alternatives, align=asked.attention is not None)
        try:
            found = await unless_gone(request, asyncio.wait_for(work, self.limits.seconds))
        except TimeoutError:
            raise RequestError(503, f"it took longer than {self.limits.seconds:g} s, the most that are given") from None
        except RegardError as error:
            raise RequestError(400, str(error)) from None
        except ModelFailed as error:
            raise RequestError(500, str(error)) from None
        finally:
            work.cancel()
        return Response(status_code=GONE) if found is None else json_response(self._answer(asked, found))

    async def list_languages(self, request: Request) -> Response:
        """GET /languages."""
        source, target = self.languages
        names = [{"code": code, "name": NAMES.get(code, code)} for code in (source, target)]
        return json_response([{**names[0], "targets": [target]}, {**names[1], "targets": []}])

    def _lines(self, asked: TranslationAsked) -> list[str]:
        """The lines of a request.

        Raises:
            RequestError: other languages, or more letters than are taken.
        """
        source, target = self.languages
        if asked.source not in (source, "auto"):
            raise RequestError(400, f"{asked.source} is not supported: this model translates from {source}")
        if asked.target != target:
            raise RequestError(400, f"{asked.target} is not supported: this model translates into {target}")
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        letters = sum(map(len, texts))
        if letters > self.limits.prompt:
            raise RequestError(413, f"the text has {letters:,} letters; {self.limits.prompt:,} are taken at most")
        return [line for text in texts for line in _split(text)]

    def _answer(self, asked: TranslationAsked, found: list[TranslatedLine]) -> dict[str, Any]:
        """The translations in the form of the request: one text, or a list; a text keeps its lines."""
        lines, texts = iter(found), [asked.q] if isinstance(asked.q, str) else asked.q
        grouped = [[next(lines) for _ in _split(text)] for text in texts]
        told: dict[str, list[Any]] = {"translatedText": [_joined(group, 0) for group in grouped]}
        if asked.alternatives:
            counts = [min(len(each.translation.candidates) for each in group) for group in grouped]
            told["alternatives"] = [
                [_joined(group, rank) for rank in range(1, count)] for group, count in zip(grouped, counts, strict=True)
            ]
        if asked.attention is not None:
            told["attention"] = [[_alignment(each, asked.attention) for each in group] for group in grouped]
        return {name: each[0] if isinstance(asked.q, str) else each for name, each in told.items()}


def _split(text: str) -> list[str]:
    return text.split("\n")


def _joined(group: list[TranslatedLine], rank: int) -> str:
    """The candidates of a rank, of lines without one the best, as one text."""
    return "\n".join(each.translation.candidates[rank].text if each.translation.candidates else "" for each in group)


def _alignment(line: TranslatedLine, asked: AlignmentAsked) -> dict[str, Any]:
    """Which source words the words of the best translation attend to, and its tokens to which tokens."""
    aligned, source = line.aligned, line.translation.source
    if aligned is None:
        raise AssertionError("a request with attention was translated without its alignment")
    told: dict[str, Any] = {"source_tokens": list(aligned.source_tokens), "target_tokens": list(aligned.target_tokens)}
    if asked.alignment:
        told |= {"source_words": source.split(), "target_words": line.translation.text.split()}
        told["alignment"] = [list(link) for link in aligned.links]
    if asked.top:
        told["top"] = _top(aligned, asked.top)
    if asked.entropy:
        weights = aligned.weights
        told["entropy"] = [round(float(-(row * row.clamp(min=1e-30).log()).sum()), 6) for row in weights]
    return told


def _top(aligned: AlignedPair, count: int) -> list[list[list[float]]]:
    """[source token, weight] of each target token, the largest weight first."""
    if not aligned.weights.numel():
        return []
    top = aligned.weights.topk(min(count, aligned.weights.shape[1]), -1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [[[column, round(weight, 6)] for column, weight in zip(*row, strict=True)] for row in pairs]
