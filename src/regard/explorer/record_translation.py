"""Record the attention of a translator for its n best translations, or for a given translation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigurationError, CorpusError
from .atlas import Atlas
from .atlas.captured_call import CapturedCall
from .atlas.records import records_from_calls
from .atlas.tokenized_text import TokenizedText
from .atlas.translation_info import RankedTranslation
from .recording import record

if TYPE_CHECKING:
    from ..translation.placeholders import PlacedLine
    from ..translation.translator import Translator


def atlas_of_translation(translator: Translator, sentence: str, *, n_best: int | None = None, title: str = "") -> Atlas:
    """Record the attention of a translator for its n best translations of a sentence, the best first.

    Maps of the decoder are there once for each of them, and `AttentionMap.hypothesis` has its text and score; those of
    the encoder are there once. Rows of cross-attention are named by the tokens that are said there, END the last; rows
    of the decoder's self-attention by the tokens that it was given, BEGIN the first. Signs that the translator does not
    know are left out, as when it translates.

    Args:
        translator: the translator, which searches by its own settings.
        sentence: what is translated.
        n_best: how many; without it as many as the beam is wide. A search may find fewer.
        title: what the atlas is called.

    Raises:
        ConfigurationError: `n_best` is not at least 1.
        CorpusError: the sentence is empty, or has more tokens than the model takes.
    """
    from ..translation.input_lines import normalize_line
    from ..translation.placeholders import PlacedLine

    settings = translator.search
    count = settings.beam if n_best is None else n_best
    if count < 1:
        raise ConfigurationError(f"n_best is {n_best}; it needs to be at least 1")
    search = settings.model_copy(update={"n_best": count, "beam": max(settings.beam, count)})
    placed = translator.placed(sentence)
    read = normalize_line(placed.text, translator.source_vocabulary).text
    found = _searched(translator, read, search)
    end = translator.target_vocabulary.special.end
    said = [[*of.ids, end] if of.finished else list(of.ids) for of in found]
    _, says = translator.vocabularies(read)
    hypotheses = [
        RankedTranslation(rank, placed.put_back(says.decode(of.ids)), of.score) for rank, of in enumerate(found)
    ]
    read_line = PlacedLine(read, placed.parts)
    return _recorded(translator, read_line, said, hypotheses, title or f"{sentence} → {hypotheses[0].text}")


def atlas_of_pair(
    translator: Translator, sentence: str, translation: str, *, gold: Any = None, title: str = ""
) -> Atlas:
    """Record the attention of a translator that is forced to produce a given translation.

    Maps are as in `atlas_of_translation`, of this one translation; words are what white space separates.

    Args:
        translator: the translator.
        sentence: what is translated.
        translation: what it says.
        gold: the links between words that people made, as `Atlas.with_gold` takes them; None for none.
        title: what the atlas is called.

    Raises:
        AtlasError: the gold links are none, or of words that are not there.
        CorpusError: a side is empty, or the sentence has more tokens than the model takes.
    """
    [placed], [target] = translator.placed_pairs([sentence], [translation])
    said = translator.vocabularies(placed.text)[1].encode(target)
    if not said:
        raise CorpusError("the translation is empty; it needs at least one word")
    atlas = _recorded(
        translator,
        placed,
        [[*said, translator.target_vocabulary.special.end]],
        [],
        title or f"{sentence} → {translation}",
    )
    return atlas if gold is None else atlas.with_gold(gold)


def _searched(translator: Translator, sentence: str, search: Any) -> list[Any]:
    """The n best hypotheses of a beam search."""
    from ..translation.search import beam_search

    source, lengths = _source(translator, sentence)
    special = translator.target_vocabulary.special
    return beam_search(translator.model, source, lengths, search, observe=False, special=special)[0]


def _source(translator: Translator, sentence: str) -> tuple[torch.Tensor, torch.Tensor]:
    from ..translation.translator import MOST_TOKENS

    ids = translator.vocabularies(sentence)[0].encode(sentence)
    if not ids:
        raise CorpusError("the sentence is empty; it needs at least one word to translate")
    most = min(MOST_TOKENS, translator.model.max_source_length or MOST_TOKENS)
    if len(ids) > most:
        raise CorpusError(f"the sentence has {len(ids)} tokens, and the model takes {most}; give it a shorter one")
    model: Any = translator.model
    device = next(model.parameters()).device
    return torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)


def _recorded(
    translator: Translator,
    placed: PlacedLine,
    said: Sequence[list[int]],
    hypotheses: Sequence[RankedTranslation],
    title: str,
) -> Atlas:
    """Run the model with forced decoding of each translation, and join the recordings in one atlas."""
    model: Any = translator.model
    source, lengths = _source(translator, placed.text)
    reads, says = translator.vocabularies(placed.text)
    words = _pieces(reads, source[0].tolist(), placed)
    calls: list[CapturedCall] = []
    tokens: list[Any] = []
    for rank, ids in enumerate(said):
        read = [translator.target_vocabulary.special.begin, *ids[:-1]]
        with torch.no_grad(), record(model) as recording:
            model(source, lengths, torch.tensor([read], device=source.device))
        spoken, given = (_pieces(says, of, placed) for of in (ids, read))
        for call in recording.calls:
            if rank and _of_encoder(call):
                continue  # the source is read alike for all of them
            calls.append(replace(call, number=rank))
            tokens.append((spoken, words) if call.kind == "cross" else words if _of_encoder(call) else given)
    order = {name: at for at, name in enumerate(dict.fromkeys(call.name for call in calls))}
    places = sorted(range(len(calls)), key=lambda at: order[calls[at].name])
    records, arrays = records_from_calls([calls[at] for at in places], [tokens[at] for at in places])
    atlas = Atlas(records, arrays, title)
    if not hypotheses:
        return atlas
    return atlas.with_hypotheses([None if _of_encoder(calls[at]) else hypotheses[calls[at].number] for at in places])


def _of_encoder(call: CapturedCall) -> bool:
    return "encoder" in call.name.split(".")


def _pieces(vocabulary: Any, ids: list[int], placed: PlacedLine) -> TokenizedText:
    return TokenizedText(list(placed.named(vocabulary.tokens(ids))), vocabulary.words(ids))
