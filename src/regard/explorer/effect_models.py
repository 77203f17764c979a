"""Models whose heads can be switched off from the explorer: of transformers, from a folder, and translators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigurationError, CorpusError
from ..heads import HeadTerms, Interventions, TokenAlignment, align_tokens, capture_patch, mean_outputs, mean_values
from ..heads import next_token_effects as token_effects
from ..heads import state_effects as moves
from ..heads.attention_edits import TermReplacement
from ..heads.interventions import likely_tokens
from ..heads.output_projection import head_projections
from .effect_request import EffectRequest

if TYPE_CHECKING:
    from ..translation.translator import Translator

LIKELIEST = 5
"""How many next tokens are told with their probabilities."""


@dataclass(frozen=True, eq=False)
class EffectRun:
    """The interventions of one request, as JSON.

    before: what the model does without them. told: of one effect, "value" and what belongs to it. alignment: between
    the tokens of the reference and of the text, where terms of the one are put into the other. tokens: of the text.
    """

    interventions: Interventions[Any, Any]
    before: dict[str, Any]
    told: Callable[[Any], dict[str, Any]]
    tokens: int
    alignment: TokenAlignment | None = None


class EffectModel(Protocol):
    """A model that answers requests for effects."""

    @property
    def kind(self) -> str:
        """What is compared: of an "encoder" a state, of a "language model" the next token, of a "translator" a text."""
        ...

    def modules(self) -> Mapping[str, int]:
        """The number of heads of each attention module, by the names that the maps of an atlas have."""
        ...

    def prepared(self, request: EffectRequest) -> EffectRun:
        """Run the model on the text, and return the interventions that are to come.

        Raises:
            RegardError: the request does not fit the model.
        """
        ...


class TextEffects:
    """A model of transformers that reads a text: states of an encoder, or next tokens of a language model.

    model: as it is recorded, so that its modules have the names of the maps. with_head: the same with its output layer,
    which a language model has.
    """

    def __init__(self, model: Any, tokenizer: Any, with_head: Any = None) -> None:
        self._model, self._tokenizer, self._with_head = model, tokenizer, with_head

    @property
    def kind(self) -> str:
        return "encoder" if self._with_head is None else "language model"

    def modules(self) -> Mapping[str, int]:
        return {name: found.heads for name, found in head_projections(self._model).items()}

    def prepared(self, request: EffectRequest) -> EffectRun:
        ids = self._ids(request.text)
        at = len(ids) - 1 if request.token is None else request.token
        if at >= len(ids):
            raise CorpusError(f"the text has the tokens 0 to {len(ids) - 1}; there is no token {at}")
        replace, alignment = self._replacement(request)
        terms = None if request.terms is None else [request.terms]
        run = self._runs(request.text)
        if self._with_head is None:
            effects = moves(self._model, lambda: run().last_hidden_state[0, at], terms, replace=replace)
            return EffectRun(effects, {}, _told_of_state, len(ids), alignment)
        effects = token_effects(self._model, lambda: run().logits[0, at], terms, replace=replace, likeliest=LIKELIEST)
        before = {"next": self._words(likely_tokens(effects.before, LIKELIEST))}
        return EffectRun(effects, before, self._told_of_token, len(ids), alignment)

    def _replacement(self, request: EffectRequest) -> tuple[TermReplacement, TokenAlignment | None]:
        if request.reference is None:
            return "mask" if request.replace == "mask" else "zero", None
        run, terms = self._runs(request.reference), request.terms or HeadTerms()
        if request.replace == "mean":
            means = mean_outputs if terms.keys is None else mean_values
            return means(self._model, run), None
        tokens = (self._tokenizer.convert_ids_to_tokens(self._ids(text)) for text in (request.reference, request.text))
        alignment = align_tokens(*tokens)
        return capture_patch(self._model, run, terms, alignment=alignment), alignment

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, verbose=False)["input_ids"]

    def _runs(self, text: str) -> Callable[[], Any]:
        """Runs the model on a text."""
        model = self._model if self._with_head is None else self._with_head
        encoded = self._tokenizer(text, return_tensors="pt", verbose=False)
        read = {name: encoded[name] for name in encoded if name in signature(self._model.forward).parameters}
        most = getattr(self._model.config, "max_position_embeddings", None)
        length = encoded["input_ids"].shape[1]
        if not length or (isinstance(most, int) and length > most):
            raise CorpusError(f"the text has {length:,} tokens, and the model takes 1 to {most or 'any number'}")
        return lambda: model(**read)

    def _told_of_token(self, effect: Any) -> dict[str, Any]:
        return {
            "value": effect.value,
            "after": {"next": self._words(effect.likeliest), "probability": effect.probability},
        }

    def _words(self, tokens: Any) -> list[list[Any]]:
        return [[self._tokenizer.decode([token]), probability] for token, probability in tokens]


def _told_of_state(effect: Any) -> dict[str, Any]:
    return {"value": effect.value, "distance": effect.relative_distance, "after": {}}


class TranslatorEffects:
    """A translator: what it says with each head switched off, and the log-probability of what it said before."""

    kind = "translator"

    def __init__(self, translator: Translator, modules: Mapping[str, int]) -> None:
        self._translator, self._modules = translator, modules

    @classmethod
    def of(cls, translator: Translator) -> TranslatorEffects | None:
        """Of a translator; None where its model has no heads that can be told apart, as recurrent ones."""
        model: Any = translator.model
        modules = {name: found.heads for name, found in head_projections(model).items()}
        return cls(translator, modules) if modules else None

    def modules(self) -> Mapping[str, int]:
        return self._modules

    def prepared(self, request: EffectRequest) -> EffectRun:
        from ..translation.translation_effects import translation_effects

        if request.token is not None:
            raise ConfigurationError("a translator is compared by what it says: token needs to be null")
        terms = None if request.terms is None else [request.terms]
        effects = translation_effects(self._translator, request.text, terms, replace=self._replacement(request))
        before = {"text": effects.before.text, "score": effects.before.score}
        return EffectRun(
            effects, before, _told_of_translation, len(self._translator.source_vocabulary.encode(request.text))
        )

    def _replacement(self, request: EffectRequest) -> TermReplacement:
        if request.reference is None:
            return "mask" if request.replace == "mask" else "zero"
        if request.replace == "before":
            raise ConfigurationError(
                "terms of another run are put into models that read one text; a translator's two texts differ in what "
                "is said, token by token: choose zero, mask or mean"
            )
        model, reference = self._translator.model, request.reference
        means: Any = mean_outputs if request.terms is None or request.terms.keys is None else mean_values
        return means(model, lambda: self._translator.translate([reference], observe=False))


def _told_of_translation(effect: Any) -> dict[str, Any]:
    after = {"text": effect.text, "score": effect.score, "changed": effect.changed}
    return {"value": effect.value, "after": after}
