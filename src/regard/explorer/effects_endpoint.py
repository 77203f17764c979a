"""POST endpoints for effects: what they will cost, and the effects themselves, a line of JSON each as it is there."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from threading import Event
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from ..errors import RegardError
from ..heads import TokenAlignment
from ..heads.interventions import ranked_effects
from .api import shortened
from .collection import Collection, RunStopped, stoppable
from .effect_models import EffectModel, EffectRun
from .effect_request import EffectRequest
from .posted_text import RequestRefused, posted_text
from .request_guard import GONE, error_response, json_response, log, model_failed

KIND = "application/json"
LINES = "application/x-ndjson"


class EffectsEndpoint:
    """Answers requests for effects of one model, one at a time; a run ends when whoever asked for it goes away."""

    def __init__(self, collection: Collection, model: EffectModel) -> None:
        self._collection, self._model = collection, model
        self._stop: Event | None = None
        self._limiter: CapacityLimiter | None = None

    async def cost(self, request: Request) -> Response:
        """How many runs of the model there will be, and about how many seconds they take, by running it once."""
        prepared = await self._prepared(request)
        if isinstance(prepared, Response):
            return prepared
        stop = self._stop or Event()
        try:
            seconds = await to_thread.run_sync(partial(_seconds, prepared, stop), limiter=self._limiter)
        except RunStopped:
            return Response(status_code=GONE)
        except RegardError as error:
            return error_response(400, str(error))
        finally:
            stop.set()
        count = len(prepared.interventions)
        return json_response({"interventions": count, "seconds": round(seconds * count, 3), "tokens": prepared.tokens})

    async def answer(self, request: Request) -> Response:
        """The effects, line by line."""
        prepared = await self._prepared(request)
        if isinstance(prepared, Response):
            return prepared
        headers = {"cache-control": "no-store"}
        return StreamingResponse(self._lines(prepared), media_type=LINES, headers=headers)

    async def _prepared(self, request: Request) -> EffectRun | Response:
        """The interventions of a request, or an error response."""
        try:
            asked = EffectRequest.parse(await posted_text(request, KIND))
        except RequestRefused as error:
            return error_response(error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=GONE)
        except RegardError as error:
            return error_response(400, str(error))
        if self._stop is not None and not self._stop.is_set():
            return error_response(409, "effects are being measured already: wait until that is done, or cancel it")
        self._limiter = self._limiter or CapacityLimiter(1)
        stop = self._stop = self._collection.measuring()
        try:
            return await to_thread.run_sync(partial(self._prepare, asked, stop), limiter=self._limiter)
        except RunStopped:
            return Response(status_code=GONE)
        except RegardError as error:
            stop.set()
            return error_response(400, str(error))
        except Exception as error:
            stop.set()
            return model_failed(error)

    def _prepare(self, asked: EffectRequest, stop: Event) -> EffectRun:
        with stoppable(stop):
            return self._model.prepared(asked)

    async def _lines(self, run: EffectRun) -> AsyncIterator[bytes]:
        """What is before, each effect, and the ranking; an error as the last line."""
        stop = self._stop or Event()
        alignment = run.alignment and _told_of_alignment(run.alignment)
        try:
            yield _line({"before": run.before, "of": len(run.interventions), "alignment": alignment})
            effects: Iterator[Any] = iter(run.interventions)
            found: list[Any] = []
            while (effect := await to_thread.run_sync(_next, effects, stop)) is not None:
                found.append(effect)
                yield _line({"done": len(found), **_named(effect), **run.told(effect)})
            yield _line({"ranked": [{**_named(each), "value": each.value} for each in ranked_effects(found)]})
        except RunStopped:
            return
        except RegardError as error:
            yield _line({"error": str(error)})
        except Exception as error:
            log.error("the model failed with a head switched off", exc_info=error)
            yield _line({"error": "the model failed at this; where the server runs it has said more"})
        finally:
            stop.set()


def _told_of_alignment(alignment: TokenAlignment) -> dict[str, Any]:
    """Pairs of positions, and the positions and tokens of either text without a partner."""
    before, now = alignment.unaligned_before, alignment.unaligned_now
    return {
        "pairs": alignment.pairs,
        "missing_before": before,
        "missing_now": now,
        "tokens": {
            "before": [shortened(alignment.before[at]) for at in before],
            "now": [shortened(alignment.now[at]) for at in now],
        },
    }


def _seconds(run: EffectRun, stop: Event) -> float:
    """What the first intervention takes."""
    start = time.perf_counter()
    _next(iter(run.interventions), stop)
    return time.perf_counter() - start


def _next(effects: Iterator[Any], stop: Event) -> Any:
    """The next effect; None after the last."""
    with stoppable(stop):
        return next(effects, None)


def _named(effect: Any) -> dict[str, Any]:
    """The module and the head of an effect, None where it is of more than one."""
    heads = [*(effect.terms.heads or ())]
    return {"module": effect.terms.module, "head": heads[0] if len(heads) == 1 else None}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(_finite(value), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
