"""Translate and align lines with a trained model, with the attention weights of each translation.

Shapes: B sentences, S source tokens, T target tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import ConfigurationError, CorpusError, DeviceError
from regard.heads.word_alignment import Link, word_links, word_weights
from regard.models import Transformer
from regard.models.decoded_target import SourceHead
from regard.models.recurrent import copies_words
from regard.translation.alignment_choice import AlignmentChoice, ObservedPair, best_choice, one_map
from regard.translation.batches import EncodedText, IdSequences, collate
from regard.translation.build_model import build_model
from regard.translation.checkpoint import LONGEST_SOURCE, restore
from regard.translation.constrained_search import Phrase, WordEdges, constrained_search
from regard.translation.ctranslate2_export import write_ctranslate2
from regard.translation.experiment import Experiment
from regard.translation.guessed_language import NAMES, other_language
from regard.translation.input_lines import cut_line, named
from regard.translation.kept_placement import diagonal_weights, put_back
from regard.translation.kept_text import KeptPart, shared_out
from regard.translation.native_marian import is_native_marian, read_native_marian
from regard.translation.placeholders import PlacedLine, Placeholders, signs_of
from regard.translation.pretrained_export import write_pretrained
from regard.translation.pretrained_parts import UNCHOSEN, Languages, PretrainedTranslator
from regard.translation.pretrained_translator import is_pretrained, read_pretrained
from regard.translation.read_line import ReadLine, end_warnings, length_warnings
from regard.translation.run_folder import RunFolder, Which, translator_folder
from regard.translation.search import BeamHypothesis, TranslationModel, beam_search
from regard.translation.sentence_batches import batches_by_length
from regard.translation.settings import SearchSettings
from regard.translation.spinning_threads import SpinningCheck
from regard.translation.taught_head import Teaching, linked_text, taught_model, teach_head
from regard.translation.terminology import Terminology, phrases_of, word_edges
from regard.translation.translated_line import Candidate, Translation, join_candidates
from regard.translation.trust import LOW, TranslationNumbers, Trust
from regard.translation.vocabulary import LineVocabulary, Vocabulary

MOST_TOKENS = 4096
"""The most tokens of a source that is read at once: time and memory of its weights grow with the square of them."""


@dataclass(frozen=True, eq=False)
class AlignedPair:
    """Attention weights [T, S] of a known translation by token, and its word links (source word, target word)."""

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    weights: Tensor
    links: tuple[Link, ...]


class Translator:
    """A trained model with its vocabularies: translates lines, and aligns lines with their translations.

    Made with `load` from the folder of a training run, or from the parts. The model is put into eval mode.

    longest_trained: how many tokens the longest sentences had that the model was trained on, at most; None where that
    is not known. alignment: whose weights `align` reads, where that was chosen. trust: what predicts the quality of a
    translation, where the model was calibrated. placeholders: what stands for the numbers, names, addresses and quoted
    words of a line while it is translated, where the model has learned to copy so. source_language: the code of the
    language that it reads, as "en", where that is known; lines that are clearly in another get a warning.
    """

    def __init__(
        self,
        model: TranslationModel,
        source_vocabulary: LineVocabulary,
        target_vocabulary: LineVocabulary,
        search: SearchSettings,
        *,
        longest_trained: int | None = None,
        alignment: AlignmentChoice | None = None,
        trust: Trust | None = None,
        placeholders: Placeholders | None = None,
        source_language: str | None = None,
    ) -> None:
        self.model = model.eval()
        self.source_vocabulary = source_vocabulary
        self.target_vocabulary = target_vocabulary
        self.search = search
        self.longest_trained = longest_trained
        self.alignment = alignment
        self.trust = trust
        self.placeholders = placeholders and placeholders.known_by(source_vocabulary)
        self.source_language = source_language

    @classmethod
    def load(
        cls,
        folder: str | Path,
        which: Which = "best",
        device: str | torch.device = "cpu",
        languages: Languages = UNCHOSEN,
    ) -> Self:
        """Load the translator of a run folder, or of an exported one; it computes in single precision.

        The folder may also be one that transformers saved, which may need `languages`, or Marian itself: see
        `from_huggingface` and `from_marian`. Translators that regard comes with have names: "english_french",
        "english_french_longer", "korean_english/luong" and "korean_english/bahdanau".

        Raises:
            CheckpointError: the folder or one of its files is missing, or the weights are truncated or of another
                model than its experiment.yaml says.
            DeviceError: there is no such device.
            ConfigurationError: `which` is neither, languages are named of a run, or the experiment.yaml was damaged.
            VocabularyError: a vocabulary was damaged.
        """
        folder = translator_folder(folder)
        if is_pretrained(folder):
            if which != "best":
                raise ConfigurationError(f"{folder} has one set of weights, that of transformers: leave {which!r} out")
            return cls.from_huggingface(folder, languages, device=device)
        if is_native_marian(folder):
            return cls.from_marian(folder, languages, device=device)
        run = RunFolder(folder)
        weights = run.weights(which)
        if languages != UNCHOSEN:
            raise ConfigurationError(f"{folder} is a run of regard, which translates between two languages: name none")
        experiment = Experiment.load(run.experiment)
        source, target = run.vocabularies()
        model = build_model(experiment.model, len(source), len(target))
        longest = restore(model, weights).get(LONGEST_SOURCE, experiment.data.max_length)
        return cls(
            model.to(_device(device)),
            source,
            target,
            experiment.search,
            longest_trained=longest,
            alignment=AlignmentChoice.load(run.path),
            trust=Trust.load(run.path),
            placeholders=Placeholders.load(run.path),
            source_language=experiment.data.source_language,
        )

    @classmethod
    def from_huggingface(
        cls,
        folder: str | Path,
        languages: Languages = UNCHOSEN,
        *,
        ignore: Collection[str] = (),
        device: str | torch.device = "cpu",
    ) -> Self:
        """Load a translator that transformers saved: Marian (OPUS-MT), M2M100, NLLB, mBART, T5, mT5 or MADLAD.

        Read are config.json, generation_config.json, the safetensors, tokenizer_config.json, and what cuts text:
        source.spm, target.spm and vocab.json of Marian, vocab.json and sentencepiece.bpe.model of M2M100,
        tokenizer.json of the others. Neither transformers nor sentencepiece is needed, nothing is downloaded, and no
        pickle is opened. It computes in single precision: logits are those of transformers to rounding, and so are the
        tokens of its greedy and beam search, in the settings of the folder. A setting that changes a translation and is
        not known here is refused, unless `ignore` has its name.

        `languages` are the codes of source and target, as ("eng_Latn", "fra_Latn"), by default those of
        tokenizer_config.json; of Marian and MADLAD it is the target alone, (None, "fr"), or each line begins with it,
        as ">>fra<< Hello." and "<2fr> Hello." T5 takes what it is to do as a part of the line.

        Sources of more than `max_position_embeddings` tokens are refused, and no translation gets longer; T5 has no
        such limit. A folder that states no longest translation allows twice the tokens of the source, and 10.

        It differs from transformers where a text spells a special token, such as "</s>": here that is text.

        Raises:
            CheckpointError: the folder is none, a file is missing or damaged, its model is of another type, a setting
                is unknown, or its weights are pickles, quantised, of several dtypes, or not those that config.json
                describes.
            ConfigurationError: a language that the model does not have, or is not told, or that is not named.
            DeviceError: there is no such device.
            VocabularyError: a vocabulary is missing, damaged, of a kind that is not read, or too large for the model.
        """
        return cls._of(read_pretrained(Path(folder), languages, ignore), Path(folder), device)

    @classmethod
    def from_marian(
        cls, folder: str | Path, languages: Languages = UNCHOSEN, *, device: str | torch.device = "cpu"
    ) -> Self:
        """Load a Transformer that Marian itself saved: decoder.yml, and the model and vocabularies that it names.

        The model is an .npz or a .bin. Vocabularies are .spm files, whose ids are the model's, or YAML files of ids
        with source.spm and target.spm beside them. Of decoder.yml, or config.intgemm8bitalpha.yml of a student of
        Bergamot, `beam-size`, `normalize` and `max-length-factor` are read. It computes in single precision, with
        Marian's own positions and layer normalisation: a folder of transformers made of the same weights has slightly
        other ones.

        Read are Transformers with norms behind each layer, and self-attention or an `SSRU` in the decoder. Weights of
        eight and sixteen bits are widened, each matrix by its own scale; what they are multiplied by is rounded in
        Marian, and not here. With a short list, where the settings name one, a search says listed words alone, each
        sentence its own; `translator.model.short_list = None` lets it say all.

        Raises:
            CheckpointError: a file is missing or damaged, several models are named, or a setting changes a translation
                in a way that is not known here; the message names it.
            ConfigurationError: a language that the model is not told, or does not have.
            DeviceError: there is no such device.
            VocabularyError: a vocabulary is missing, damaged, or does not fit the model.
        """
        return cls._of(read_native_marian(Path(folder), languages), Path(folder), device)

    @classmethod
    def _of(cls, read: PretrainedTranslator, folder: Path, device: str | torch.device) -> Self:
        """A translator that others trained, with what was chosen and calibrated in its folder."""
        return cls(
            read.model.to(_device(device)),
            read.source_vocabulary,
            read.target_vocabulary,
            read.search,
            alignment=AlignmentChoice.load(folder),
            trust=Trust.load(folder),
        )

    def to_huggingface(self, folder: str | Path, *, max_positions: int = 1024) -> None:
        """Write the translator as the folder of a `MarianMTModel`, which transformers loads with equal logits.

        A Transformer with norms after each layer, sinusoidal positions and softmax is one. Ids are those of the
        vocabularies, whose files go into the folder too: transformers has no tokenizer for them, so encode with
        `Vocabulary.load(folder / "source.vocabulary.json")`; `from_huggingface` reads them. `max_positions` is how many
        positions the table of transformers has.

        Raises:
            CheckpointError: the folder holds something already, or cannot be written.
            ConfigurationError: the model is none that `MarianMTModel` can compute; the message names what differs.
        """
        vocabularies = self.source_vocabulary, self.target_vocabulary
        write_pretrained(Path(folder), self.model, vocabularies, self.search, max_positions)

    def to_ctranslate2(self, folder: str | Path, *, max_positions: int = 1024) -> None:
        """Write the translator as the folder of a CTranslate2 model, in float32, with equal logits.

        `ctranslate2.Translator(folder)` loads it, and quantises it where it is asked to. It takes and returns pieces:
        encode with `Vocabulary.load(folder / "source.vocabulary.json")` and its `tokens`. `max_positions` is how many
        positions the table has that CTranslate2 reads. Models are those of `to_huggingface`.

        Raises:
            CheckpointError: the folder holds something already, or cannot be written.
            ConfigurationError: CTranslate2 cannot compute the model; the message names what differs.
            MissingExtra: ctranslate2 is not installed.
        """
        vocabularies = self.source_vocabulary, self.target_vocabulary
        write_ctranslate2(Path(folder), self.model, vocabularies, max_positions)

    def quantize(self) -> None:
        """Round the weights of a Transformer's decoder to int8, and translate faster with them on a CPU.

        A few translations change. It cannot be undone but by loading again. See `Transformer.quantize_decoder`.

        Raises:
            ConfigurationError: the model is no Transformer.
        """
        if not isinstance(self.model, Transformer):
            raise ConfigurationError(
                f"the model is a {type(self.model).__name__}, and only a Transformer's decoder has steps in int8: "
                "leave it in single precision"
            )
        self.model.quantize_decoder()

    def translate(
        self,
        lines: Sequence[str],
        *,
        search: SearchSettings | None = None,
        batch_size: int | None = None,
        first_line: int = 1,
        observe: bool = True,
        split_above: int | None = None,
        terms: Terminology | None = None,
    ) -> list[Translation]:
        """Translate lines, in their order; sentences of like length are computed together.

        `batch_size` is how many of them at most; without it 64, or more where they are short: see `batches_by_length`.

        A line of white space has an empty translation. Tags, as <b>, variables, as {name} and %s, signs that the
        vocabulary does not know in any form, such as emoji, and words of more than 200 characters are kept as they are,
        and have no tokens and no weights. By the attention that `align` reads, a pair of tags is put around the words
        that translate what it was around, and the others where the words beside them went: see `put_back`. Of a model
        with `placeholders` numbers, addresses, quoted words and unknown names come out as they are, and with their
        `unknown_words` all words that are unknown; of its beam a translation that has them all is best. A model with a
        pointer copies words that its vocabulary of words lacks. Words of unknown letters are translated as far as that
        goes. The `warnings` of the line say so, and also where it has
        more tokens than any that the model was trained on, or a tag has no partner. `first_line` is the number of the
        first line in messages. Without `observe` there are no weights, and a model of many layers and heads is faster.

        A line of more tokens than `split_above` is translated in parts, and a warning says so: its sentences, and of a
        sentence of more than twice as many tokens pieces. Its candidates are the best combinations of those of its
        parts; their scores are sums, and their weights are 0 from one part to another. Without `split_above` a source
        longer than the model allows is refused: the translation of half a sentence looks like that of a whole one.

        With `terms` each translation holds the phrases that they name for its source, as whole words; they are found by
        `constrained_search`.

        Raises:
            CorpusError: a line has more tokens than the model allows, or than are read at once, or it is translated in
                parts and `terms` have phrases of every translation.
            VocabularyError: the target vocabulary cannot write a phrase of a translation.
            ConfigurationError: the phrases of a line have more tokens than the model allows in a translation.
        """
        terms = terms or Terminology()
        placed = [self.placed(line, but=terms.source_words) for line in _several(lines)]
        read = [self._read(*one) for one in zip(placed, lines, strict=True)]
        parts = [self._parts(line.rest.text, split_above) for line in read]
        numbers = [number for number, some in enumerate(parts, start=first_line) for _ in some]
        texts = [part for some in parts for part in some]
        sources = self._encode(texts, numbers)
        settings = search or self.search
        phrases = self._phrases(parts, sources, terms, first_line)
        found = iter(zip(sources, self._search(texts, sources, phrases, settings, batch_size, observe), strict=True))
        return [
            self._translation(line, some, list(islice(found, len(some))), number, settings.n_best)
            for number, (line, some) in enumerate(zip(read, parts, strict=True), start=first_line)
        ]

    def placed(self, line: str, but: Collection[str] = ()) -> PlacedLine:
        """A line as the model reads it, with placeholders, but for some words; the line itself of a model without."""
        if self.placeholders is None:
            return PlacedLine(line)
        return self.placeholders.but_for(but).as_read(line)

    def placed_pairs(
        self, source_lines: Sequence[str], target_lines: Sequence[str]
    ) -> tuple[list[PlacedLine], Sequence[str]]:
        """Known translations with placeholders for what both sides have; they have as many words as before.

        Raises:
            CorpusError: the sides differ in length.
        """
        _check_pairs(source_lines, target_lines)
        if self.placeholders is None:
            return [PlacedLine(line) for line in source_lines], target_lines
        placed = list(map(self.placeholders.placed_pair, source_lines, target_lines))
        return [line for line, _ in placed], [line for _, line in placed]

    def vocabularies(self, source_line: str) -> tuple[LineVocabulary, LineVocabulary]:
        """The vocabularies of both sides for a source line and what is said of it.

        Of a model with a pointer they have the words of the line that the model's vocabulary lacks, which it copies.
        """
        source, target = self.source_vocabulary, self.target_vocabulary
        if not (copies_words(self.model) and isinstance(source, Vocabulary) and isinstance(target, Vocabulary)):
            return source, target
        return source.extended(source_line), target.extended(source_line)

    def _read(self, placed: PlacedLine, line: str) -> ReadLine:
        read = ReadLine.of(placed, line, self.source_vocabulary)
        return read.without_guesses() if copies_words(self.model) else read

    def _parts(self, line: str, split_above: int | None) -> list[str]:
        if split_above is None:
            return [line]
        most = self.model.max_source_length
        longest = 2 * split_above if most is None else min(2 * split_above, most)
        above = split_above if most is None else min(split_above, most)
        language = self.source_vocabulary.language(line)  # every part is translated into it
        text = line.lstrip().removeprefix(language)
        parts = cut_line(text, lambda part: len(self.source_vocabulary.encode(language + part)), above, longest)
        return [language + part for part in parts]

    def _phrases(
        self, lines: list[list[str]], sources: list[list[int]], terms: Terminology, first_line: int
    ) -> list[list[Phrase]]:
        """The phrases that the translation of each part of each line has to hold."""
        for number, parts in enumerate(lines, start=first_line):
            if len(parts) > 1 and terms.always:
                raise CorpusError(
                    f"line {number} is translated in {len(parts):,} parts, and {terms.always[0]!r} could be said in "
                    "any of them: give one sentence a line, or translate it whole"
                )
        if not terms:
            return [[] for _ in sources]
        texts = [part.removeprefix(self.source_vocabulary.language(part)) for parts in lines for part in parts]
        return [
            phrases_of(terms.of(text), self.vocabularies(text)[0].words(ids), self.target_vocabulary)
            for text, ids in zip(texts, sources, strict=True)
        ]

    def _search(
        self,
        texts: list[str],
        sources: list[list[int]],
        phrases: list[list[Phrase]],
        settings: SearchSettings,
        batch_size: int | None,
        observe: bool,
    ) -> list[list[BeamHypothesis]]:
        """The hypotheses of each source, none of an empty one; those that have its placeholders come first."""
        placed = [bool(signs_of(text)) for text in texts] if self.placeholders else []
        if not any(placed):
            return self._beams(sources, phrases, settings, batch_size, observe)
        wide = settings.model_copy(update={"n_best": settings.beam})
        plain = [[] if signs else ids for ids, signs in zip(sources, placed, strict=True)]
        found = self._beams(plain, phrases, settings, batch_size, observe)
        rows = [row for row, signs in enumerate(placed) if signs]
        own = [sources[row] for row in rows], [phrases[row] for row in rows]
        for row, beam in zip(rows, self._beams(*own, wide, batch_size, observe), strict=True):
            needed = signs_of(texts[row])
            vocabulary = self.vocabularies(texts[row])[1]
            said = [signs_of(vocabulary.decode(one.ids)) for one in beam]
            wrong = [((needed - one) + (one - needed)).total() for one in said]
            found[row] = [beam[place] for place in sorted(range(len(beam)), key=wrong.__getitem__)][: settings.n_best]
        return found

    def _beams(
        self,
        sources: list[list[int]],
        phrases: list[list[Phrase]],
        settings: SearchSettings,
        batch_size: int | None,
        observe: bool,
    ) -> list[list[BeamHypothesis]]:
        """The hypotheses of each source, best first, none of an empty one."""
        packed = IdSequences.pack(sources)
        found: list[list[BeamHypothesis]] = [[] for _ in sources]
        spinning, special = SpinningCheck(), self.target_vocabulary.special
        forced = [sum(one.size for one in some) for some in phrases]
        for rows in batches_by_length(sources, batch_size, settings.beam, forced):
            source, lengths = (torch.from_numpy(array).to(self._device) for array in packed.pad(np.array(rows)))
            some = [phrases[row] for row in rows]
            told = {"observe": observe, "special": special}
            if any(some):
                where = {"alignment": self._said_alignment, **told}
                best = constrained_search(self.model, source, lengths, some, self._edges, settings, **where)
            else:
                best = beam_search(self.model, source, lengths, settings, **told)
            for row, hypotheses in zip(rows, best, strict=True):
                found[row] = hypotheses
            spinning.check()
        return found

    @property
    def _said_alignment(self) -> AlignmentChoice:
        """The attention that was chosen, if it is that of the step that says a word; else the mean of all."""
        chosen = self.alignment
        return AlignmentChoice() if chosen is None or chosen.step != "says" else chosen

    @functools.cached_property
    def _edges(self) -> WordEdges:
        return WordEdges(*(of.to(self._device) for of in word_edges(self.target_vocabulary)))

    def align(
        self,
        source_lines: Sequence[str],
        target_lines: Sequence[str],
        *,
        batch_size: int | None = None,
        first_line: int = 1,
        layer: int | None = None,
        head: int | None = None,
    ) -> list[AlignedPair]:
        """Attention weights of the model on known translations (forced decoding), and the word links that follow.

        Of several layers and heads the weights are those of the chosen ones, counted from 0, or their mean. Where none
        is chosen they are those of `alignment`, which `choose_alignment` has found; without it the mean over all, of
        the step that says each token. There is no row for END. A pair with an empty side has no links.

        Raises:
            ConfigurationError: there is no such layer or head.
            CorpusError: the sides differ in length, or a source has more tokens than the model allows.
        """
        chosen = AlignmentChoice(layer, head)
        if layer is None and head is None and self.alignment is not None:
            chosen = self.alignment
        pairs: list[AlignedPair | None] = [None] * len(source_lines)
        placed, targets = self.placed_pairs(source_lines, target_lines)
        sources = [line.text for line in placed]
        for row, source, target, seen in self._observed(sources, targets, batch_size, first_line):
            weights = one_map(seen.rows(chosen.step), chosen.layer, chosen.head).clone()
            reads, says = self.vocabularies(sources[row])
            pairs[row] = AlignedPair(
                source_tokens=placed[row].named(reads.tokens(source)),
                target_tokens=placed[row].named(says.tokens(target)),
                weights=weights,
                links=tuple(word_links(weights, seen.source_words, seen.target_words)),
            )
        return [pair or self._of_no_source(line) for pair, line in zip(pairs, target_lines, strict=True)]

    def _of_no_source(self, target_line: str) -> AlignedPair:
        """A target whose source is empty: no step has anything to look at."""
        tokens = self.target_vocabulary.tokens(self.target_vocabulary.encode(target_line))
        return AlignedPair((), tuple(tokens), torch.zeros(len(tokens), 0), ())

    def choose_alignment(
        self,
        source_lines: Sequence[str],
        target_lines: Sequence[str],
        links: Sequence[Collection[Link]],
        *,
        batch_size: int | None = None,
    ) -> AlignmentChoice:
        """Find the head, or mean of heads, whose links are nearest to given ones, and keep it as `alignment`.

        The links of each pair may be those of `align_words`, which learns them from the text alone. Tried are every
        head, the mean of every layer and the mean of all, at the step that says a word and at that which reads it.
        `AlignmentChoice.save(folder)` keeps the choice with a model, and `load` reads it.

        Raises:
            CorpusError: the sides or the links differ in length, or a source has more tokens than the model allows.
        """
        _check_links(links, source_lines)
        placed, targets = self.placed_pairs(source_lines, target_lines)
        observed = self._observed([line.text for line in placed], targets, batch_size, 1)
        self.alignment = best_choice((seen, frozenset(links[row])) for row, _, _, seen in observed)
        return self.alignment

    def teach_alignment(
        self,
        source_lines: Sequence[str],
        target_lines: Sequence[str],
        links: Sequence[Collection[Link]],
        head: SourceHead | None = None,
        teaching: Teaching | None = None,
    ) -> AlignmentChoice:
        """Teach one head of a Transformer to link words as the given links do, and keep it as `alignment`.

        Links and lines are those of `choose_alignment`. Only queries and keys of the head's layer change, and the model
        goes on learning to translate beside: see `teach_head`. Without a head it is the one of `alignment`, else head 0
        of the last layer but one. `write_taught` writes the model.

        Raises:
            ConfigurationError: the model is no Transformer, or has no such head.
            CorpusError: as `choose_alignment`, or there are no links.
        """
        _check_links(links, source_lines)
        placed, known = self.placed_pairs(source_lines, target_lines)
        chosen = self.alignment
        if head is None and chosen is not None and chosen.layer is not None and chosen.head is not None:
            head = SourceHead(chosen.layer, chosen.head)
        sources = self._encode([line.text for line in placed], range(1, len(placed) + 1))
        targets = self.target_vocabulary.encode_batch(known)
        words = [
            (self.source_vocabulary.words(source), self.target_vocabulary.words(target))
            for source, target in zip(sources, targets, strict=True)
        ]
        text, place = linked_text(sources, targets, words, links), head or SourceHead()
        model = taught_model(self.model)
        teach_head(model, text, place, self.target_vocabulary.special, teaching or Teaching())
        self.alignment = AlignmentChoice(*model.checked_place(place), pairs=len(text))
        return self.alignment

    def calibrate(self, translations: Sequence[Translation], references: Sequence[str]) -> Trust:
        """Learn from its translations of text with known ones how far others can be trusted, and keep it as `trust`.

        The text should be such as the model was not trained on, of all kinds that it may meet. `Trust.save(folder)`
        keeps it with a model, and `load` reads it.

        Raises:
            CorpusError: there are not as many translations as references, or fewer than 100 that are not empty.
        """
        from regard.translation.bleu import sentence_quality  # which loads sacrebleu

        if len(translations) != len(references):
            raise CorpusError(
                f"there are {len(translations):,} translations and {len(references):,} references: each needs its own"
            )
        known = [(one, line) for one, line in zip(translations, references, strict=True) if one.candidates and line]
        numbers = [_numbers(one.candidates[0], len(one.source_tokens), one.unknown_words) for one, _ in known]
        self.trust = Trust.fit(numbers, [sentence_quality(one.text, line) for one, line in known])
        return self.trust

    def _observed(
        self, source_lines: Sequence[str], target_lines: Sequence[str], batch_size: int | None, first_line: int
    ) -> Iterator[tuple[int, list[int], list[int], ObservedPair]]:
        """The number of each pair, its ids, and the weights of all steps; pairs of like length one after the other."""
        _check_pairs(source_lines, target_lines)
        sources = self._encode(source_lines, range(first_line, first_line + len(source_lines)))
        vocabularies = [self.vocabularies(line) for line in source_lines]
        targets = [says.encode(line) for (_, says), line in zip(vocabularies, target_lines, strict=True)]
        for rows in batches_by_length(sources, batch_size):
            seen = self._seen(
                [sources[row] for row in rows], [targets[row] for row in rows], [vocabularies[row] for row in rows]
            )
            for row, one in zip(rows, seen, strict=True):
                yield row, sources[row], targets[row], one

    @torch.no_grad()
    def _seen(
        self,
        sources: list[list[int]],
        targets: list[list[int]],
        vocabularies: list[tuple[LineVocabulary, LineVocabulary]],
    ) -> list[ObservedPair]:
        """The weights of all steps of each translation, computed together."""
        text = EncodedText(IdSequences.pack(sources), IdSequences.pack(targets))
        batch = collate(text, np.arange(len(sources)), self.target_vocabulary.special).to(self._device)
        weights = self.model.attention_weights(batch.source, batch.source_lengths, batch.target_input).cpu()
        return [
            ObservedPair(
                one[: len(target) + 1, ..., : len(source)],
                reads.words(source),
                says.words(target),
            )
            for one, source, target, (reads, says) in zip(weights, sources, targets, vocabularies, strict=True)
        ]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _encode(self, lines: Sequence[str], numbers: Sequence[int]) -> list[list[int]]:
        """The ids of each line, all short enough for the model; none for a line of white space."""
        sources = [self.vocabularies(line)[0].encode(line) for line in _several(lines)]
        most = self.model.max_source_length
        for number, ids in zip(numbers, sources, strict=True):
            if most is not None and len(ids) > most:
                raise CorpusError(
                    f"line {number} has {len(ids)} tokens and this model allows {most}; split it into shorter "
                    "sentences, or train with a larger model.max_source_length"
                )
            if len(ids) > MOST_TOKENS:
                raise CorpusError(
                    f"line {number} has {len(ids):,} tokens, and at most {MOST_TOKENS:,} are read at once: split it "
                    "into sentences"
                )
        return sources

    def _translation(
        self,
        read: ReadLine,
        texts: list[str],
        parts: list[tuple[list[int], list[BeamHypothesis]]],
        number: int,
        n_best: int,
    ) -> Translation:
        """The translation of a line from the texts, ids and hypotheses of its parts, most often one."""
        ids = [one for part, _ in parts for one in part]
        source_tokens = [
            token
            for text, (part, _) in zip(texts, parts, strict=True)
            for token in self.vocabularies(text)[0].tokens(part)
        ]
        words = [len(text.removeprefix(self.source_vocabulary.language(text)).split()) for text in texts]
        kept = shared_out(read.kept.parts, words)
        candidates = [
            self._candidates(text, *part, some, count)
            for text, part, some, count in zip(texts, parts, kept, words, strict=True)
        ]
        joined = candidates[0] if len(parts) == 1 else join_candidates(candidates, n_best)
        warnings = [
            *read.warnings(ids, self.source_vocabulary.special),
            *length_warnings(len(ids), len(parts), self.longest_trained),
        ]
        if joined:
            warnings += [*end_warnings(joined[0], len(parts)), *self._doubts(read, joined[0].text)]
        trust = None
        if self.trust is not None and joined:
            trust = self.trust.of(_numbers(joined[0], len(ids), read.placed.unknown))
            if trust < LOW:
                warnings.append(f"the translation is likely to be poor: predicted chrF {100 * trust:.0f} of 100")
        return Translation(
            source=read.line,
            source_tokens=read.placed.named(source_tokens),
            candidates=tuple(candidate.with_parts(read.placed) for candidate in joined),
            warnings=tuple(f"line {number}: {warning}" for warning in warnings),
            kept=read.placed.put_back(put_back("", read.kept.parts, torch.zeros(0, 0))),
            trust=trust,
            unknown_words=read.placed.unknown,
        )

    def _doubts(self, read: ReadLine, said: str) -> Iterator[str]:
        """Sentences about a line in another language than the model reads, unknown words, and what is not copied."""
        if self.source_language and (other := other_language(read.placed.spelled, self.source_language)):
            known = NAMES.get(self.source_language, self.source_language)
            yield f"it seems to be {NAMES[other]}, and the model reads {known}: the translation is a guess"
        if read.placed.unknown:
            yield f"words that the model does not know stay as they are: {named(read.placed.unknown)}"
        if missing := read.placed.missing(said):
            yield f"the translation leaves out {named(missing)}"

    def _candidates(
        self, line: str, source: list[int], hypotheses: list[BeamHypothesis], kept: list[KeptPart], words: int
    ) -> tuple[Candidate, ...]:
        """The hypotheses of a line of so many words, as text with what is kept of it."""
        reads, says = self.vocabularies(line)
        texts = [says.decode(one.ids) for one in hypotheses]
        if kept and hypotheses:
            count = len(hypotheses)
            seen = self._seen([source] * count, [list(one.ids) for one in hypotheses], [(reads, says)] * count)
            of_words = [self._between_words(one, words, text) for text, one in zip(texts, seen, strict=True)]
            texts = [put_back(text, kept, one) for text, one in zip(texts, of_words, strict=True)]
        return tuple(_candidate(one, text, says) for one, text in zip(hypotheses, texts, strict=True))

    def _between_words(self, pair: ObservedPair, words: int, text: str) -> Tensor:
        """The attention between words [T', S'] of a text and a source; that of position where words differ."""
        chosen = self.alignment or AlignmentChoice()
        weights = one_map(pair.rows(chosen.step), chosen.layer, chosen.head)
        between = word_weights(weights, pair.target_words, pair.source_words)
        count = len(text.split())
        return between if between.shape == (count, words) else diagonal_weights(words, count)


def _candidate(hypothesis: BeamHypothesis, text: str, vocabulary: LineVocabulary) -> Candidate:
    ids = [*hypothesis.ids, vocabulary.special.end] if hypothesis.finished else hypothesis.ids
    return Candidate(
        text=text,
        tokens=tuple(vocabulary.tokens(ids)),
        score=hypothesis.score,
        log_probability=hypothesis.log_probability,
        weights=hypothesis.weights,
        self_weights=hypothesis.self_weights,
        finished=hypothesis.finished,
    )


def _numbers(best: Candidate, source_tokens: int, unknown_words: Collection[str]) -> TranslationNumbers:
    """What the model says of a translation."""
    return TranslationNumbers(best.log_probability, len(best.tokens), source_tokens, len(unknown_words))


def _check_pairs(source_lines: Sequence[str], target_lines: Sequence[str]) -> None:
    if len(source_lines) != len(target_lines):
        raise CorpusError(
            f"the sides do not line up: there are {len(source_lines):,} source lines and {len(target_lines):,} target "
            "lines; line i of one needs to translate line i of the other"
        )


def _check_links(links: Sequence[Collection[Link]], source_lines: Sequence[str]) -> None:
    if len(links) != len(source_lines):
        raise CorpusError(f"there are {len(source_lines):,} pairs and links of {len(links):,}: each pair needs its own")


def _several(lines: Sequence[str]) -> Sequence[str]:
    if isinstance(lines, str):
        raise CorpusError(f"lines is one text, {lines[:40]!r}; it needs to be a list of lines")
    return lines


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"the device {str(name)!r} cannot be used here: {reason}; cpu always can") from None
    return device
