"""Steps that are computed again for each change of a page: sentence, mechanism, word, head, and what-ifs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, nearest
from .installed_mechanisms import MECHANISMS, choose_mechanism
from .page_tables import base_key, left_out, page_tables
from .step_table import Walkthrough
from .translation_steps import Kind, TranslatedSentence
from .what_if import WhatIf
from .worked_examples import EXAMPLES, worked_example

if TYPE_CHECKING:
    from ..translation.run_folder import Which
    from ..translation.translator import Translator

CHECKPOINT = "checkpoint"
"""The mechanism of a page whose translator is a checkpoint of one's own."""
TYPES = {str: "a text", int: "a whole number", list: "a list", type(None): "null"}
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("mechanism", "sentence", "kind"), (str,)),
    **dict.fromkeys(("word", "source_word"), (int,)),
    **dict.fromkeys(("layer", "head"), (int, type(None))),
    "changes": (list,),
}
"""The types of the fields of a request in JSON."""
LONGEST_SENTENCE, MOST_CHANGES = 1000, 50


@dataclass(frozen=True)
class StepRequest:
    """What a page asks for, in the terms of the command: words, keys and source words are counted from 1.

    mechanism: a name of `MECHANISMS`, "checkpoint", or "example:NAME" for a worked example, which has a word, its query
    whose row changes, and changes alone.
    layer: None for the last. head: None for all heads. changes: as `WhatIf.parse` reads them.
    """

    mechanism: str
    sentence: str = ""
    word: int = 1
    kind: Kind = "cross"
    layer: int | None = None
    head: int | None = 0
    source_word: int = 1
    changes: tuple[str, ...] = ()

    @classmethod
    def read(cls, values: Any) -> StepRequest:
        """Check the decoded JSON of a request.

        Raises:
            ConfigurationError: it is not an object with the fields of a request; the message names the field.

        >>> StepRequest.read({"mechanism": "dot", "sentence": "나는 학생이다", "word": 4}).word
        4
        """
        if not isinstance(values, dict):
            raise ConfigurationError(f"a request is a {type(values).__name__}; it needs to be an object of JSON")
        for name, value in values.items():
            if name not in FIELDS:
                raise ConfigurationError(f"a request has no field {str(name)[:40]!r}; {nearest(str(name), FIELDS)}")
            if type(value) not in FIELDS[name]:
                needs = " or ".join(TYPES[one] for one in FIELDS[name])
                raise ConfigurationError(f"{name} is {json.dumps(value)[:40]}; it needs to be {needs}")
        if "mechanism" not in values:
            raise ConfigurationError("the field 'mechanism' is missing; it says which translator or example to show")
        changes = values.get("changes", [])
        if len(changes) > MOST_CHANGES or any(type(one) is not str or len(one) > 60 for one in changes):
            raise ConfigurationError(f"changes needs to be at most {MOST_CHANGES} short texts, such as 'flip=2'")
        if len(values.get("sentence", "")) > LONGEST_SENTENCE:
            raise ConfigurationError(
                f"the sentence has {len(values['sentence'])} characters, and at most {LONGEST_SENTENCE} are read: take "
                "a shorter one"
            )
        return cls(**{**values, "changes": tuple(changes)})


class LiveSteps:
    """Answers the requests of a page: translators are loaded once, and the last sentences stay translated.

    Not to be called by several threads at once: hooks of a model see all its calls.

    Args:
        checkpoint: a translator of one's own, beside those that regard comes with: the folder of a run.
        which: which of its weights.
        languages: of source and target, where it has many; None: those of its folder.
    """

    def __init__(
        self,
        checkpoint: Path | None = None,
        which: Which = "best",
        languages: tuple[str | None, str | None] = (None, None),
    ) -> None:
        self._checkpoint = checkpoint
        self._which: Which = which
        self._languages = languages
        self._translator = lru_cache(maxsize=None)(self._load)
        self._translated = lru_cache(maxsize=4)(self._translate)
        self._trained = lru_cache(maxsize=16)(self._steps)
        self._example = lru_cache(maxsize=16)(worked_example)

    def options(self) -> dict[str, Any]:
        """What a page can choose from: mechanisms with their titles and sentences, and worked examples."""
        mechanisms = [
            {"name": name, "title": one.title._asdict(), "sentence": one.sentence, "reads": one.reads}
            for name, one in MECHANISMS.items()
        ]
        if self._checkpoint is not None:
            name = self._checkpoint.name or str(self._checkpoint)
            mechanisms.insert(0, {"name": CHECKPOINT, "title": {"en": name, "ko": name}, "sentence": "", "reads": ""})
        examples = [
            {"name": f"example:{name}", "title": {"en": one.title.en, "ko": one.title.text("ko")}}
            for name, one in EXAMPLES.items()
        ]
        return {"mechanisms": mechanisms, "examples": examples}

    def answer(self, request: StepRequest) -> dict[str, Any]:
        """The tables of a request as plain values of texts, and what its page can choose and change.

        Raises:
            CorpusError, ConfigurationError: as `translation_steps`, `WhatIf` and `worked_example`.
        """
        if example_name(request.mechanism):
            return self._example_answer(request)
        request = self._resolved(request)
        translated = self._translated(request.mechanism, request.sentence)
        before, after, warnings = self.walkthroughs(request)
        return {
            "sentence": translated.sentence,
            "translation": translated.translation,
            "source": translated.source.names,
            "target": translated.targets,
            "warnings": warnings,
            "places": translated.places,
            "request": asdict(request),
            "keys": before["weights"].columns,
            "attends": _attends(after),
            "attended": _attends(before),
            "scores": _scores(before),
            "scaled": _is_scaled(before) or "score=scaled_dot" in request.changes,
            "adds": True,
            "drops": False,
            "next": _next_words(before, after, request),
            "tables": page_tables(after, before if request.changes else None),
            "left_out": left_out(after, before),
            "command": self._command(request),
        }

    def walkthroughs(self, request: StepRequest) -> tuple[Walkthrough, Walkthrough, tuple[str, ...]]:
        """The steps of a sentence as trained and with the changes, and warnings of characters that are not known.

        Raises:
            CorpusError, ConfigurationError: as `translation_steps` and `WhatIf`.
        """
        if name := example_name(request.mechanism):
            before = after = self._example(name)
            if request.changes:
                after = worked_example(name, WhatIf.parse(request.changes, _row(before, request)))
            return before, after, ()
        request = self._resolved(request)
        before = self._trained(replace(request, changes=()))
        after = self._steps(request) if request.changes else before
        return before, after, self._translated(request.mechanism, request.sentence).warnings

    def _example_answer(self, request: StepRequest) -> dict[str, Any]:
        """The tables of a worked example, and what its page can change."""
        before, after, _ = self.walkthroughs(request)
        name = example_name(request.mechanism)
        queries, keys = pair_names(before)
        changes = EXAMPLES[name].changes
        whole = "drop" in changes
        row = len(queries) - 1 if whole else _row(before, request)
        head = None if "head1.scores" in before.keys else 0
        return {
            "title": before.title._asdict(),
            **({} if before.note is None else {"note": before.note._asdict()}),
            "request": asdict(
                replace(StepRequest(request.mechanism), word=row + 1, head=head, changes=request.changes)
            ),
            "queries": () if whole else queries,
            "keys": keys if changes else (),
            "attends": _sees(after, row, keys),
            "attended": _sees(before, row, keys),
            "scores": _scores(before) if "score" in changes else (),
            "scaled": ("scale" in changes and _is_scaled(before)) or "score=scaled_dot" in request.changes,
            "adds": "add" in changes,
            "drops": whole,
            "next": _next_words(before, after, request),
            "tables": page_tables(after, before if request.changes else None),
            "left_out": left_out(after, before),
            "command": shlex.join(_example_command(name, row, request.changes)),
        }

    def _resolved(self, request: StepRequest) -> StepRequest:
        """The request with the head and layer that its mechanism has.

        Raises:
            ConfigurationError: a mechanism that is not there, or that does not read the sentence's script.
        """
        if request.mechanism == CHECKPOINT and self._checkpoint is not None:
            heads = request.head
        else:
            heads = None if choose_mechanism(request.sentence, request.mechanism).all_heads else request.head or 0
        places = self._translated(request.mechanism, request.sentence).places
        if not places:
            return replace(request, head=request.head or 0)
        layer = request.layer
        if layer is None and request.kind in places:
            layer = places[request.kind][0] - 1
        return replace(request, head=heads, layer=layer)

    def _load(self, folder: Path, which: Which) -> Translator:
        from ..translation.translator import Translator

        languages = self._languages if folder == self._checkpoint else (None, None)
        return Translator.load(folder, which, languages=languages)

    def _translate(self, mechanism: str, sentence: str) -> TranslatedSentence:
        if mechanism == CHECKPOINT and self._checkpoint is not None:
            return TranslatedSentence.of(self._translator(self._checkpoint, self._which), sentence)
        chosen = choose_mechanism(sentence, mechanism)
        return TranslatedSentence.of(self._translator(chosen.folder, "best"), sentence)

    def _steps(self, request: StepRequest) -> Walkthrough:
        """The walkthrough of a request whose head and layer are known."""
        translated = self._translated(request.mechanism, request.sentence)
        row = request.source_word - 1 if request.kind == "encoder" else request.word - 1
        return translated.steps(
            word=request.word - 1,
            kind=request.kind,
            layer=request.layer,
            head=request.head,
            source_word=request.source_word - 1,
            what_if=WhatIf.parse(request.changes, row) if request.changes else None,
        )

    def _command(self, request: StepRequest) -> str:
        """The command that prints the same tables."""
        parts = ["regard", "steps", request.sentence]
        if request.mechanism == CHECKPOINT:
            parts += ["--checkpoint", str(self._checkpoint)]
            if any(self._languages):
                parts += ["--languages", ":".join(code or "" for code in self._languages)]
        else:
            parts += ["--score", request.mechanism]
        parts += ["--word", str(request.word)]
        if request.layer is not None:
            parts += ["--kind", request.kind, "--layer", str(request.layer)]
            parts += [] if request.head is None else ["--head", str(request.head)]
        if request.kind == "encoder":
            parts += ["--source-word", str(request.source_word)]
        for change in request.changes:
            parts += ["--what-if", change]
        return shlex.join(parts)


def example_name(mechanism: str) -> str:
    """The name of the worked example that a mechanism is; "" for a translator.

    >>> example_name("example:flash")
    'flash'
    """
    return mechanism.removeprefix("example:") if mechanism.startswith("example:") else ""


def pair_names(shown: Walkthrough) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the queries and keys of a worked example, as its scores have them.

    >>> pair_names(worked_example("ring"))
    (('q3', 'q4'), ('k1', 'k2', 'k3', 'k4'))
    """
    scores = [table for table in shown.tables if base_key(table) == "scores"]
    if not scores:
        return (), ()
    keys = dict.fromkeys(name for table in scores for name in table.columns)  # of all heads, or of all hops
    order = next((table.rows for table in shown.tables if base_key(table) == "key"), ())
    return scores[0].rows, tuple(name for name in order if name in keys) or tuple(keys)


def _row(shown: Walkthrough, request: StepRequest) -> int:
    """The query whose row a request changes, counted from 0.

    Raises:
        ConfigurationError: there is no such query.
    """
    count = len(pair_names(shown)[0]) or 1
    if request.word > count:
        raise ConfigurationError(f"query {request.word} is not there: the worked example has {count}, counted from 1")
    return request.word - 1


def _sees(shown: Walkthrough, row: int, keys: Sequence[str]) -> list[bool]:
    """Which keys the mask leaves to a row of a worked example: those whose score is above -inf."""
    bases = [base_key(table) for table in shown.tables]
    base = "masked_scores" if "masked_scores" in bases else "scores"
    known: dict[str, bool] = {}
    for table, name in zip(shown.tables, bases, strict=True):
        if name in ("scores", base):
            known |= dict(zip(table.columns, table.numbers[row].isfinite().tolist(), strict=True))
    return [known.get(key, True) for key in keys]


def _is_scaled(shown: Walkthrough) -> bool:
    return any(base_key(table) == "scaled_scores" for table in shown.tables)


def _example_command(name: str, row: int, changes: Sequence[str]) -> list[str]:
    """The command that prints the same tables of a worked example."""
    parts = ["regard", "steps", "--example", name]
    if changes:
        parts += ["--word", str(row + 1)]
    for change in changes:
        parts += ["--what-if", change]
    return parts


def _attends(shown: Walkthrough) -> list[bool]:
    """Which keys the mask leaves to the first row."""
    mask = next((table for table in shown.tables if table.key == "mask"), None)
    if mask is None:
        return [True] * len(shown["weights"].columns)
    return [bool(number) for number in mask.numbers[0].tolist()]


def _scores(trained: Walkthrough) -> list[str]:
    """The score that the attention was trained with, then those that can take its place."""
    keys = {base_key(table) for table in trained.tables}
    if "score_vector" in keys:
        own = "additive"
    elif "projected_query" in keys:
        own = "general"
    else:
        own = "scaled_dot" if "scaled_scores" in keys else "dot"
    return [own, *(name for name in ("dot", "scaled_dot") if name != own)]


def _next_words(before: Walkthrough, after: Walkthrough, request: StepRequest) -> list[Mapping[str, str]]:
    """The next word, and the one after the changes; none of an example that predicts none."""
    if "prediction" not in before.keys:
        return []
    return [next_word(one) for one in ((before, after) if request.changes else (before,))]


def next_word(shown: Walkthrough) -> Mapping[str, str]:
    """The most probable next word of a walkthrough that predicts one, and its probability."""
    table = shown["prediction"]
    most = int(table.numbers[0].argmax())
    return {"word": table.columns[most], "probability": f"{float(table.numbers[0, most]):.3f}"}
