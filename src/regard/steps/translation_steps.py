"""One word of a trained translator step by step: from embeddings through one head's attention to the next word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ..core.score_forms import AdditivePairs
from ..errors import ConfigurationError, CorpusError, nearest
from ..kernels.hooks import AttentionSubstitute, active_substitute
from ..models import RecurrentTranslator, Transformer
from ..models.recurrent import BahdanauDecoder, Covered, RecurrentMemory, RecurrentState, copies_words
from ..models.recurrent.decoders import TanhReadout
from ..models.recurrent.source_attention import SourceAttention
from ..nn import SSRU
from ..scores import General
from .captured_attention import CapturedAttention, captured_calls
from .step_table import StepTable, Walkthrough, make_table, numbered
from .walkthrough import MOST_POSITIONS, AllHeadsView, HeadView, attention_tables
from .what_if import WhatIf
from .wording import Wording

if TYPE_CHECKING:
    from ..translation.placeholders import PlacedLine
    from ..translation.translator import Translator
    from ..translation.vocabulary import LineVocabulary

Kind = Literal["cross", "self", "encoder"]
"""Attention of the decoder to the source, of the decoder to the words so far, and of the encoder."""
MOST_WORDS = 5
"""Candidates for the next word that are printed."""

LUONG_STEPS = ("scores", "weights", "context", "concatenated", "attentional", "prediction")
BAHDANAU_STEPS = ("scores", "weights", "context", "cell_input", "next_state", "prediction")
TRANSFORMER_STEPS = ("scores", "scaled_scores", "weights", "context", "concatenation", "output", "prediction")


def translation_steps(
    translator: Translator,
    sentence: str,
    *,
    word: int = 0,
    kind: Kind = "cross",
    layer: int | None = None,
    head: int | None = 0,
    source_word: int = 0,
    what_if: WhatIf | None = None,
) -> Walkthrough:
    """How a trained translator chooses one word: embeddings, attention of one head, context, and the next words.

    The model runs as it does when it translates, up to that word of its best translation; every number is one that it
    computed. The steps of the textbook are numbered.

    Args:
        translator: a `Translator`, of a run of `regard train` or one that is installed.
        sentence: what it translates, of at most 24 tokens.
        word: the token of the translation to predict, from 0; the end of the sentence is the last.
        kind: of a Transformer "cross", the decoder's attention to the source, "self", the decoder's to the words so
            far, or "encoder".
        layer: of a Transformer, from 0; the last by default.
        head: of a Transformer, from 0; None for all heads, one row for each.
        source_word: of the encoder's attention, the token whose attention is printed, from 0.
        what_if: a change to the attention of this head, or of all heads, for this word, whose query has the number
            `word` (of the encoder `source_word`); all that follows is computed again, the words before it stay.

    Raises:
        CorpusError: the sentence is empty, or longer than can be printed.
        ConfigurationError: a word, layer or head that is not there; the message has those that are. A model without
            attention to print.

    >>> from regard.steps import translation_steps
    >>> from regard.translation.run_folder import ENGLISH_FRENCH
    >>> from regard.translation.translator import Translator
    >>> steps = translation_steps(Translator.load(ENGLISH_FRENCH), "I am tired.", layer=1, head=2)
    >>> steps["prediction"].columns[0]
    'Je'
    """
    translated = TranslatedSentence.of(translator, sentence)
    return translated.steps(word=word, kind=kind, layer=layer, head=head, source_word=source_word, what_if=what_if)


@dataclass(frozen=True, eq=False)
class TranslatedSentence:
    """A sentence with its best translation, found once; `steps` computes the tables of one of its words.

    warnings: of characters that the source vocabulary lacks, and what placeholders stand for. target: the ids of the
    translation, with that of its end.
    """

    translator: Translator
    sentence: str
    translation: str
    source: SourceSentence
    target: tuple[int, ...]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, translator: Translator, sentence: str) -> TranslatedSentence:
        """Translate a sentence.

        Raises:
            CorpusError, ConfigurationError: as `translation_steps`.
        """
        model: Any = translator.model
        if not isinstance(model, RecurrentTranslator | Transformer):
            raise ConfigurationError(
                f"{type(model).__name__} is not a translator whose steps are known: it needs to be a "
                "RecurrentTranslator or a Transformer"
            )
        placed, warnings, source = _encoded(translator, sentence)
        translation, target = _translated(translator, source)
        read, said = placed.put_back(placed.text), placed.put_back(translation)
        return cls(translator, read, said, source, tuple(target), warnings)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the tokens of the translation."""
        return _names(self.says, self.target)

    @property
    def says(self) -> LineVocabulary:
        """The vocabulary of what is said of the sentence."""
        return self.translator.vocabularies(self.source.text)[1]

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Layers and heads of a Transformer by the kind of attention; empty for a recurrent translator."""
        model: Any = self.translator.model
        if isinstance(model, RecurrentTranslator):
            return {}
        kinds = [kind for kind in get_args(Kind) if kind != "self" or not _is_recurrent(model)]
        layers = {kind: len((model.encoder if kind == "encoder" else model.decoder).blocks) for kind in kinds}
        return {
            kind: (count, _chosen_attention(model, kind, None, None).projections.num_heads)
            for kind, count in layers.items()
        }

    def steps(
        self,
        *,
        word: int = 0,
        kind: Kind = "cross",
        layer: int | None = None,
        head: int | None = 0,
        source_word: int = 0,
        what_if: WhatIf | None = None,
    ) -> Walkthrough:
        """The tables of one word of the translation, as `translation_steps`."""
        model: Any = self.translator.model
        targets = self.targets
        _check_number("word", word, targets, "the translation")
        _check_number("source word", source_word, self.source.names, "the sentence")
        if isinstance(model, RecurrentTranslator):
            if kind != "cross" or layer or head:
                raise ConfigurationError(
                    "a recurrent translator has one attention of one head, to the source: leave kind, layer and head "
                    "out"
                )
            tables = _recurrent_steps(model, self.source, self.target[:word], what_if)
        else:
            row = source_word if kind == "encoder" else word
            place = (kind, layer, head, row)
            tables = _transformer_steps(self.translator, model, self.source, self.target[:word], place, what_if)
        best = tables.logits.double().softmax(-1).topk(MOST_WORDS)
        words = _names(self.says, best.indices.tolist())
        wording = "mixed_prediction" if copies_words(model) else None
        prediction = make_table("prediction", best.values, [f"P(y{word + 1})"], words, wording=wording)
        title = f"{self.sentence} → {self.translation}"
        return Walkthrough(
            Wording(f"{title}; word {word + 1}: {targets[word]}", f"{title}; {word + 1}번째 단어: {targets[word]}"),
            numbered([*tables.tables, prediction], tables.numbered),
        )


@dataclass(frozen=True, eq=False)
class SourceSentence:
    """An encoded sentence: it, its ids [1, S], its length [1], and the names of its tokens."""

    text: str
    ids: Tensor
    lengths: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PredictedTables:
    """The tables up to the output layer, the logits of the next word, and which tables the textbook numbers."""

    tables: Sequence[StepTable]
    logits: Tensor
    numbered: tuple[str, ...] = ()


@torch.no_grad()
def _recurrent_steps(
    model: RecurrentTranslator, source: SourceSentence, prefix: Sequence[int], what_if: WhatIf | None
) -> PredictedTables:
    """The tables of a recurrent decoder after a prefix of target tokens."""
    from ..translation.vocabulary import BEGIN

    decoder, device = model.decoder, source.ids.device
    with captured_calls(embedding=model.source_embedding) as encoding:
        memory = model.encode(source.ids, source.lengths)
    state = model.start(memory)
    tokens = [torch.tensor([token], device=device) for token in (BEGIN, *prefix)]
    for token in tokens[:-1]:
        state = model.step(token, state, memory).state
    captured = CapturedAttention({decoder.attend: "decoder.attend"}, 0, 0, what_if)
    modules = {"cell": decoder.cell, "readout": decoder.readout, "embedding": model.target_embedding}
    if isinstance(decoder.readout, TanhReadout):
        modules["project"] = decoder.readout.project
    if model.pointer is not None:
        modules["pointer"] = model.pointer
    with captured_calls(**modules) as calls, active_substitute(AttentionSubstitute(captured)):
        step = model.step(tokens[-1], state, memory)
    number = len(tokens)
    bahdanau = isinstance(decoder, BahdanauDecoder)
    view = HeadView.of(captured.problem, queries=[f"s{number - bahdanau}"], keys=source.names)
    score = None if what_if is not None and what_if.score is not None else decoder.attend.score
    before = state.hidden[0][0, -1]
    after = step.state.hidden[0][0, -1]
    encoder = [
        make_table("source_embedding", encoding["embedding"][1][0], source.names),
        make_table("annotations", memory.values[0], source.names),
        make_table("target_embedding", calls["embedding"][1][0], [f"y{number - 1}"]),
    ]
    attention = [
        *_covered(decoder.attend, state, memory, number, source.names),
        *_projected(view, score),
        *attention_tables(view, score),
    ]
    gate = calls["pointer"][1][0, -1].sigmoid() if "pointer" in calls else None
    generation = [] if gate is None else [make_table("generation", gate, [f"p{number}"], ["p_gen"])]
    context_dim = memory.values.shape[-1]
    if bahdanau:
        cell_input = calls["cell"][0][0][0, -1]
        parts = (len(cell_input) - context_dim, context_dim)
        tables = [
            *encoder,
            make_table("previous_state", before, [f"s{number - 1}"]),
            *attention,
            make_table("cell_input", cell_input, [f"[y{number - 1}; c{number}]"], parts=parts),
            make_table("next_state", after, [f"s{number}"]),
            make_table("readout", calls["readout"][1].unflatten(-1, (-1, 2)).amax(-1)[0, -1], [f"x{number}"]),
            *generation,
        ]
        return PredictedTables(tables, step.logits[0], BAHDANAU_STEPS)
    joined = calls["project"][0][0] if "project" in calls else calls["readout"][1]
    parts = (context_dim, joined.shape[-1] - context_dim)
    readout = [make_table("concatenated", joined[0, -1], [f"[c{number}; s{number}]"], parts=parts)]
    if "project" in calls:
        readout = [
            *readout,
            make_table("attentional", calls["readout"][1][0, -1], [f"s̃{number}"]),
        ]
    tables = [*encoder, make_table("decoder_state", after, [f"s{number}"]), *attention, *readout, *generation]
    return PredictedTables(tables, step.logits[0], LUONG_STEPS)


def _covered(
    attend: SourceAttention, state: RecurrentState, memory: RecurrentMemory, number: int, source: Sequence[str]
) -> Iterator[StepTable]:
    """The coverage before a step, and the fertility, where the score reads them as sums of weights."""
    if state.coverage is None or not isinstance(attend.coverage, Covered):
        return
    yield make_table("coverage", state.coverage[0], [f"c{number}"], source)
    if attend.coverage.fertility is not None:
        yield make_table("fertility", attend.coverage.fertility(memory.values)[0], ["Φ"], source)


def _projected(view: HeadView, score: object) -> Iterator[StepTable]:
    """Queries and keys that the score has multiplied by its matrices."""
    pairs = view.problem.pairs
    if isinstance(pairs, AdditivePairs) or isinstance(score, General):
        wording = "general_query" if isinstance(score, General) else None
        yield make_table("projected_query", view.of_queries(pairs.query), view.query_names, wording=wording)
    if isinstance(pairs, AdditivePairs):
        yield make_table("projected_key", view.of_keys(pairs.key), view.keys)


@torch.no_grad()
def _transformer_steps(
    translator: Translator,
    model: Transformer,
    source: SourceSentence,
    prefix: Sequence[int],
    place: tuple[Kind, int | None, int | None, int],
    what_if: WhatIf | None,
) -> PredictedTables:
    """The tables of one head, or of all heads, of a Transformer after a prefix of target tokens."""
    kind, layer, head, row = place
    attention: Any = _chosen_attention(model, kind, layer, head)
    read = [translator.target_vocabulary.special.begin, *prefix]
    target = torch.tensor([read], device=source.ids.device)
    said = _names(translator.target_vocabulary, read)
    captured = CapturedAttention({attention: f"{kind} attention"}, head, row, what_if)
    projections = attention.projections
    with (
        captured_calls(
            embedding=model.source_embedding, query=projections.query, output=projections.output, layers=model.output
        ) as calls,
        active_substitute(AttentionSubstitute(captured)),
    ):
        # One table of embeddings may serve both sides; the source is embedded first.
        memory = model.encode(source.ids, source.lengths)
        embedded = calls["embedding"][1]
        features = model.decoder(model.target_embedding(target), memory.layers, memory.mask)
        logits = model.output(features[:, -1])
        logits = (logits if memory.listed is None else memory.listed.restrict(logits))[0]
    keys = said if kind == "self" else source.names
    queries = source.names if kind == "encoder" else [f"q{number + 1}" for number in range(len(read))]
    view = HeadView.of(captured.problem, head=head or 0, rows=[row], queries=queries, keys=keys)
    own, heads = view.query_names, projections.num_heads
    joined = calls["output"][0][0][0, row]
    tables = [
        make_table("source_embedding", embedded[0], source.names),
        make_table("input", calls["query"][0][0][0, row], own),
        *(_all_heads(view) if head is None else _one_head(view)),
        make_table("concatenation", joined, own, parts=(len(joined) // heads,) * heads),
        make_table("output", calls["output"][1][0, row], own),
        make_table("decoder_features", features[0, -1], [f"x{len(read)}"]),
    ]
    return PredictedTables(tables, logits, TRANSFORMER_STEPS)


def _one_head(view: HeadView) -> Iterator[StepTable]:
    """Projections and attention of one head."""
    pairs = view.problem.pairs
    yield make_table("query", view.of_queries(pairs.query), view.query_names)
    yield make_table("key", view.of_keys(pairs.key), view.keys)
    yield make_table("value", view.of_keys(view.problem.value), view.keys)
    yield from attention_tables(view)


def _all_heads(view: HeadView) -> Iterator[StepTable]:
    """Queries and attention of all heads, one row for each; weighted values, a table for each head, are left out."""
    heads = AllHeadsView.of_row(view)
    yield make_table("query", heads.of_queries(view.problem.pairs.query), heads.query_names)
    yield from (table for table in attention_tables(heads) if not table.key.startswith("weighted_values"))


def _chosen_attention(model: Transformer, kind: str, layer: int | None, head: int | None) -> Any:
    """The attention layer of that kind and layer.

    Raises:
        ConfigurationError: a kind, layer or head that is not there.
    """
    if kind not in get_args(Kind):
        raise ConfigurationError(f"kind is {kind!r}; {nearest(kind, get_args(Kind))}")
    blocks: Any = (model.encoder if kind == "encoder" else model.decoder).blocks
    layer = len(blocks) - 1 if layer is None else layer
    if not 0 <= layer < len(blocks):
        raise ConfigurationError(f"layer is {layer}; there are {len(blocks)}, 0 to {len(blocks) - 1}")
    attention = blocks[layer].cross_attention if kind == "cross" else blocks[layer].attention
    if isinstance(attention, SSRU):
        raise ConfigurationError(
            "this decoder has an SSRU, a recurrent layer, and no attention to its own words: kind 'cross' or 'encoder' "
            "has what it attends to"
        )
    heads = attention.projections.num_heads
    if head is not None and not 0 <= head < heads:
        raise ConfigurationError(f"head is {head}; there are {heads}, 0 to {heads - 1}")
    return attention


def _is_recurrent(model: Transformer) -> bool:
    """Whether the decoder has recurrent layers in the place of self-attention."""
    return any(isinstance(module, SSRU) for module in model.decoder.modules())


def _encoded(translator: Translator, sentence: str) -> tuple[PlacedLine, tuple[str, ...], SourceSentence]:
    """The sentence in characters that the translator knows, warnings of those that it does not, and the encoding."""
    from ..translation.input_lines import normalize_line

    placed = translator.placed(sentence)
    line = normalize_line(placed.text, translator.source_vocabulary)
    vocabulary, _ = translator.vocabularies(line.text)
    if copies_words(translator.model):
        line = replace(line, guessed=())
    ids = vocabulary.encode(line.text)
    if not ids:
        raise CorpusError("the sentence is empty; it needs at least one word to translate")
    most = min(MOST_POSITIONS, translator.model.max_source_length or MOST_POSITIONS)
    if len(ids) > most:
        raise CorpusError(
            f"the sentence has {len(ids)} tokens, and steps are printed for at most {most}: take a shorter one"
        )
    device = next(iter(translator.model.parameters())).device
    numbers, lengths = torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)
    source = SourceSentence(line.text, numbers, lengths, _names(vocabulary, ids))
    stand_for = (f"{sign} stands for {part!r}" for sign, part in placed.stand_for.items())
    return replace(placed, text=line.text), (*line.warnings(), *stand_for), source


def _translated(translator: Translator, source: SourceSentence) -> tuple[str, list[int]]:
    """The best translation, and its ids with END."""
    from ..translation.search import beam_search

    special = translator.target_vocabulary.special
    found = beam_search(translator.model, source.ids, source.lengths, translator.search, observe=False, special=special)
    best = found[0][0]
    text = translator.vocabularies(source.text)[1].decode(best.ids)
    return text, [*best.ids, *([special.end] if best.finished else [])]


def _names(vocabulary: LineVocabulary, ids: Sequence[int]) -> tuple[str, ...]:
    """Tokens for reading, without a mark of spaces: a piece of a word that is not its first has a hyphen."""
    has_pieces = vocabulary.has_subwords
    names = []
    for token_id, token in zip(ids, vocabulary.tokens(ids), strict=True):
        text = token.removeprefix("▁") or token
        inner = has_pieces and not vocabulary.is_special(token_id) and text == token and any(map(str.isalnum, text))
        names.append(f"-{text}" if inner else text)
    return tuple(names)


def _check_number(name: str, number: int, names: Sequence[str], where: str) -> None:
    if not 0 <= number < len(names):
        raise ConfigurationError(f"there is no such {name}: {where} has {len(names)} tokens, {' '.join(names)}")
