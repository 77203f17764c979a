"""What a translator says when parts of its attention are switched off, and what it thinks of what it said before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CorpusError
from ..heads import HeadTerms, Interventions
from ..heads.attention_edits import TermReplacement
from .input_lines import normalize_line
from .search import SearchSettings, beam_search
from .translator import Translator


@dataclass(frozen=True)
class Said:
    """A translation of a sentence with its score, and the log-probability of a given translation, in nats."""

    text: str
    score: float
    log_probability: float


@dataclass(frozen=True)
class TranslationEffect:
    """One intervention: what is said, its score in the search, and the change of the log-probability of what was said.

    value: the log-probability (nats) of the translation before, now, less that before the intervention.
    """

    terms: HeadTerms
    value: float
    text: str
    score: float
    changed: bool


def translation_effects(
    translator: Translator,
    sentence: str,
    terms: Iterable[HeadTerms] | None = None,
    *,
    replace: TermReplacement = "zero",
) -> Interventions[Said, TranslationEffect]:
    """What a translator makes of a sentence when each head is switched off: text, score, and log-probability.

    The sentence is searched anew each time. Beside that the translation that was said without an intervention is scored
    again: its log-probability changes also where the text does not.

    Args:
        translator: a translator whose model computes its attention by `regard.attention`.
        sentence: what is translated.
        terms: what is replaced, one after another; by default each head.
        replace: by what, as in `regard.heads.editing`.

    Raises:
        ConfigurationError: the model has no attention that can be edited, as recurrent ones; what `editing` raises.
        CorpusError: the sentence is empty, or too long.

    >>> from regard.translation.run_folder import ENGLISH_FRENCH
    >>> effects = translation_effects(Translator.load(ENGLISH_FRENCH), "The cat is on the table.")
    >>> len(effects), effects.before.text
    (54, 'Le chat est sur la table.')
    """
    scoring = _ScoredTranslation(translator, sentence)

    def measure(terms: HeadTerms, before: Said, after: Said) -> TranslationEffect:
        change = after.log_probability - before.log_probability
        return TranslationEffect(terms, change, after.text, after.score, after.text != before.text)

    model: Any = translator.model
    return Interventions(model, scoring.said, measure, terms, replace=replace)


class _ScoredTranslation:
    """A sentence that is translated again and again; the first translation is scored each time."""

    def __init__(self, translator: Translator, sentence: str) -> None:
        self._model: Any = translator.model
        self._placed = translator.placed(sentence)
        text = normalize_line(self._placed.text, translator.source_vocabulary).text
        reads, self._vocabulary = translator.vocabularies(text)
        ids = reads.encode(text)
        if not ids:
            raise CorpusError("the sentence is empty; it needs at least one word to translate")
        most = translator.model.max_source_length
        if most is not None and len(ids) > most:
            raise CorpusError(f"the sentence has {len(ids)} tokens, and the model takes {most}; give it a shorter one")
        device = next(self._model.parameters()).device
        self._source = torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)
        self._search: SearchSettings = translator.search
        self._scored: list[int] | None = None

    def said(self) -> Said:
        """Translate, and score the first translation."""
        special = self._vocabulary.special
        best = beam_search(self._model, *self._source, self._search, observe=False, special=special)[0][0]
        if self._scored is None:
            self._scored = [*best.ids, special.end] if best.finished else list(best.ids)
        target = torch.tensor([[special.begin, *self._scored[:-1]]], device=self._source[0].device)
        logits = self._model(*self._source, target)[0].double().log_softmax(-1)
        chosen = logits[torch.arange(len(self._scored)), self._scored]
        text = self._placed.put_back(self._vocabulary.decode(best.ids))
        return Said(text, float(best.score), float(chosen.sum()))
