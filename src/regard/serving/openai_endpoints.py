"""Endpoints in OpenAI's form: /v1/completions, /v1/chat/completions, /v1/models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..errors import PagesExhausted, RegardError
from ..explorer.asgi_app import GONE
from ..explorer.request_guard import json_response
from ..models.language_model import LanguageModel
from .api_errors import RequestError, checked, read_body
from .batch_worker import BatchWorker, ModelFailed, TextJob, TextToContinue
from .client_watch import unless_gone
from .limits import ServingLimits
from .openai_answers import AnswerForm, ChatForm, CompletionForm, WrittenAnswer
from .openai_requests import ChatAsked, CompletionAsked, GenerationAsked
from .text_codec import TextCodec

DEFAULT_NEW = 256
"""New tokens where a request does not say how many."""


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request as texts for the batch, the answers that they become, and their form."""

    texts: list[TextToContinue]
    choices: list[WrittenAnswer]
    form: AnswerForm
    prompt: int


@dataclass(frozen=True, eq=False)
class GenerationEndpoints:
    """Continue texts, and answer in conversations, with one language model."""

    name: str
    model: LanguageModel
    codec: TextCodec
    worker: BatchWorker
    limits: ServingLimits

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = checked(await read_body(request, self.limits.body), CompletionAsked)
        prompts = [self.codec.encode(each) if isinstance(each, str) else each for each in asked.prompts]
        return await self._answer(request, self._read(asked, prompts, CompletionForm))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = checked(await read_body(request, self.limits.body), ChatAsked)
        try:
            text = self.codec.chat([message.plain() for message in asked.messages])
        except RegardError as error:
            raise RequestError(400, str(error), "messages") from None
        return await self._answer(request, self._read(asked, [self.codec.encode(text, begins=False)], ChatForm))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "regard"}
        return json_response({"object": "list", "data": [model]})

    def _read(self, asked: GenerationAsked, prompts: Sequence[list[int]], form: type[AnswerForm]) -> _Asked:
        """The texts of a request, checked.

        Raises:
            RequestError: another model, more tokens than are taken, layers that are not there, no text.
        """
        if asked.model not in (None, self.name):
            raise RequestError(404, f"there is no model {asked.model!r} here, but {self.name!r}", "model")
        longest = max(map(len, prompts), default=0)
        if not prompts or not all(prompts):
            raise RequestError(400, "the text has no tokens: it needs one at least to go on from", "prompt")
        if longest > self.limits.prompt:
            raise RequestError(
                413, f"the text has {longest:,} tokens; {self.limits.prompt:,} are taken at most", "prompt"
            )
        new = DEFAULT_NEW if asked.most_new is None else asked.most_new
        if new > self.limits.tokens:
            raise RequestError(
                413, f"{new:,} new tokens are asked for; {self.limits.tokens:,} are made at most", "max_tokens"
            )
        self._check_layers(asked)
        texts = [
            TextToContinue(
                prompt,
                new,
                asked.sampling,
                self.codec.stop,
                None if asked.seed is None else (asked.seed + number) % 2**63,
                () if asked.attention is None else asked.attention.lenses,
                asked.likeliest,
            )
            for prompt in prompts
            for number in range(asked.n)
        ]
        choices = [WrittenAnswer(self.codec, asked, self.codec.stop) for _ in texts]
        told = [] if asked.attention is None else [self.codec.decode([token]) for token in prompts[0]]
        return _Asked(texts, choices, form(self.name, asked, told), sum(map(len, prompts)))

    def _check_layers(self, asked: GenerationAsked) -> None:
        count = len(self.model.blocks)
        wrong = [] if asked.attention is None else [n for n in asked.attention.layers or [] if not 0 <= n < count]
        if wrong:
            raise RequestError(400, f"there is no layer {wrong[0]}: the model has {count}, 0..{count - 1}", "attention")

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        job = self.worker.add(asked.texts, self.limits.seconds)
        try:
            if not asked.form.asked.stream:
                answer = await unless_gone(request, self._whole(job, asked))
                return Response(status_code=GONE) if answer is None else json_response(answer)
            stream = self._parts(job, asked, request.scope["path"])
            first = await unless_gone(request, anext(stream))  # an error before it has a status of its own
            if first is None:
                return Response(status_code=GONE)
            headers = {"cache-control": "no-store"}
            parts, job = _StreamedAnswer(first, stream, job), None
            return StreamingResponse(parts, media_type="text/event-stream", headers=headers)
        finally:
            if job is not None:
                job.cancel()

    async def _whole(self, job: TextJob, asked: _Asked) -> dict[str, Any]:
        """The whole answer.

        Raises:
            RequestError: it takes too long, or the model fails.
        """
        async for _ in self._texts(job, asked):
            pass
        return asked.form.whole(asked.choices, asked.prompt)

    async def _parts(self, job: TextJob, asked: _Asked, path: str) -> AsyncIterator[bytes]:
        """The parts of an answer, as server-sent events; an error after the first is an event too."""
        form, told, options = asked.form, set(), asked.form.asked.stream_options
        try:
            async for index, text in self._texts(job, asked):
                choice = asked.choices[index]
                if text or choice.reason is not None or index not in told:
                    yield _event(form.part(index, choice, text, first=index not in told))
                    told.add(index)
            if options is not None and options.include_usage:
                yield _event(form.last(asked.choices, asked.prompt))
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            if not told:
                raise
            yield _event(error.body(path))

    async def _texts(self, job: TextJob, asked: _Asked) -> AsyncIterator[tuple[int, str]]:
        """(number of the answer, more text of it), until all have ended."""
        try:
            async for index, new in job:
                choice = asked.choices[index]
                text = choice.take(new)
                if choice.has_stopped and new.reason is None:
                    job.end(index)
                yield index, text
        except TimeoutError:
            raise RequestError(
                503, f"the answer took longer than {self.limits.seconds:g} s, the most that are given"
            ) from None
        except PagesExhausted as error:
            raise RequestError(413, str(error)) from None
        except RegardError as error:
            raise RequestError(400, str(error)) from None
        except ModelFailed as error:
            raise RequestError(500, str(error)) from None


class _StreamedAnswer:
    """The parts of an answer; its texts end when the client has gone, or all is sent."""

    def __init__(self, first: bytes, stream: AsyncIterator[bytes], job: TextJob) -> None:
        self._first, self._stream, self._job = first, stream, job

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            yield self._first
            async for part in self._stream:
                yield part
        finally:
            self._job.cancel()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
