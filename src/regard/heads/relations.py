"""Relations between words that textbooks name, as pairs of a query word and its right key words in parsed sentences.

The sentences are those of Universal Dependencies, with parts of speech and features: `read_conllu` reads them. UD
annotates neither the scope of negation nor reference across sentences; the proxies of both are defined in
`english_negations`, `korean_negations` and `repeated_nouns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import ConfigurationError, ShapeError
from .linguistics import ROOT, Sentence, Span

WordPairs = Iterable[tuple[int, Collection[int]]]
"""Query words, each with its right key words."""

OUTSIDE = frozenset(
    {"nsubj", "csubj", "dislocated", "vocative", "punct", "conj", "cc", "parataxis", "advcl", "discourse", "root"}
)
"""Dependents of a negated word that the scope of negation leaves out: subject, topic, marks, and other clauses."""


@dataclass(frozen=True)
class RelationCase:
    """One query of a relation in one text: a closed span of words, its candidates, and which of them are right.

    candidates: closed spans of words, or None for every other word; answers are their indices, or words. rules: the
    rules by position alone that choose a right candidate, such as "+1" or "nearest".
    """

    query: Span
    answers: frozenset[int]
    rules: frozenset[str]
    candidates: tuple[Span, ...] | None = None

    @classmethod
    def of_word(cls, query: int, answers: Collection[int], *, offsets: bool = True) -> RelationCase:
        """A case with all other words as candidates; its rules are the offsets of the answers, or none.

        >>> sorted(RelationCase.of_word(2, [1, 5]).rules)
        ['+3', '-1']
        """
        rules = frozenset(f"{answer - query:+d}" for answer in answers) if offsets else frozenset[str]()
        return cls((query, query), frozenset(answers), rules)

    @classmethod
    def of_choice(cls, query: Span, candidates: Sequence[Span], answers: Collection[int]) -> RelationCase:
        """A case with the given candidates; its rules choose the "nearest" or the "farthest", by the words between.

        Raises:
            ConfigurationError: there is no choice: all candidates are right, or none.

        >>> sorted(RelationCase.of_choice((4, 4), [(0, 1), (2, 2)], [0]).rules)
        ['farthest']
        """
        right = frozenset(answers)
        if not right < set(range(len(candidates))) or not right:
            raise ConfigurationError(
                f"of {len(candidates)} candidates {sorted(right)} are right: there needs to be a right and a wrong one"
            )
        distances = [max(query[0] - last, first - query[1]) for first, last in candidates]
        by_rule = {"nearest": distances.index(min(distances)), "farthest": distances.index(max(distances))}
        rules = frozenset(rule for rule, chosen in by_rule.items() if chosen in right)
        return cls(query, right, rules, tuple(candidates))


@dataclass(frozen=True)
class WordRelation:
    """A relation between words of a sentence: its name, its definition in words, and the function that finds its pairs.

    positional: the relation is itself an offset, so no offset is a baseline of it.
    """

    name: str
    definition: str
    pairs: Callable[[Sentence], WordPairs]
    positional: bool = False

    def cases(self, sentence: Sentence) -> list[RelationCase]:
        """The cases of a sentence, one for each query word that has a right key word.

        Raises:
            ConfigurationError: the sentence has no parts of speech or features.

        >>> words, tags = ("a", "cat"), ("DET", "NOUN")
        >>> sentence = Sentence(words, (1, -1), ("det", "root"), words, tags, tags, (frozenset(),) * 2)
        >>> [(one.name, one.cases(sentence)[0].query) for one in english_relations() if one.cases(sentence)]
        [('next token', (0, 0)), ('previous token', (1, 1)), ('article → noun', (0, 0)), ('noun → article', (1, 1))]
        """
        words = len(sentence.words)
        annotations = sentence.lemmas, sentence.upos, sentence.xpos, sentence.features
        if any(len(each) != words for each in annotations):
            raise ConfigurationError(
                f"the sentence has {words} words, and {' / '.join(str(len(each)) for each in annotations)} lemmas, "
                "upos, xpos and features: relations need each for every word, as read_conllu gives them"
            )
        found = self.pairs(sentence)
        return [
            RelationCase.of_word(query, answers, offsets=not self.positional) for query, answers in found if answers
        ]


@dataclass(frozen=True)
class Negation:
    """A negator, the word that it negates, and its scope, that word included: indices of words."""

    negator: int
    governor: int
    scope: frozenset[int]


def english_negations(sentence: Sentence) -> list[Negation]:
    """The negators of an English sentence with the word that each negates, and a proxy of its scope.

    Negators are words with Polarity=Neg or PronType=Neg that are adverbs (advmod) or determiners (det): not, n't,
    never, no. The governor g, the negated word, is the negator's head in the tree. The scope is

        {g} ∪ {w : w > negator, the path from w to g has no relation of OUTSIDE}

    UD does not annotate scope: this is the predicate and its complements. Corpora of scope count the subject, too, and
    decide what "not ... because" negates, which a tree does not tell.

    Source: relations and features, universaldependencies.org; the scope of negation as a task, Morante and Blanco 2012
    (*SEM shared task), whose annotation includes the subject.

    >>> words = ("She", "did", "not", "eat", "fish")
    >>> features = tuple(frozenset({"Polarity=Neg"} if word == "not" else ()) for word in words)
    >>> sentence = Sentence(words, (3, 3, 3, -1, 3), ("nsubj", "aux", "advmod", "root", "obj"), features=features)
    >>> english_negations(sentence)
    [Negation(negator=2, governor=3, scope=frozenset({3, 4}))]
    """
    negators = [
        word
        for word, (relation, features) in enumerate(zip(sentence.relations, sentence.features, strict=True))
        if sentence.heads[word] != ROOT
        and _plain(relation) in ("advmod", "det")
        and features & {"Polarity=Neg", "PronType=Neg"}
    ]
    return [
        Negation(word, governor, frozenset({governor, *(one for one in below if one > word)}))
        for word in negators
        for governor in [sentence.heads[word]]
        for below in [_inner_subtree(sentence, governor, word)]
    ]


def korean_negations(sentence: Sentence) -> list[Negation]:
    """The negators of a Korean sentence with the predicate that each negates, and a proxy of its scope.

    Negators are the auxiliaries 않다, 못하다 and 말다 (tags px, VX) right of their head, and the adverbs 안, 못 and
    아니 (mag, MAG) left of it. 없다 and 아니다 negate by themselves and have no other word to attend to. The governor g
    is the negator's head. The scope is

        {g} ∪ {w : w < g, the path from w to g has no relation of OUTSIDE}

    The Korean treebanks annotate neither polarity nor scope. An eojeol is one word here, so negation inside a word
    (먹지않는다 without a space, 비-, 불-) is not seen.

    >>> lemmas, tags = ("밥+을", "먹+지", "않+는다"), ("ncn+jco", "pvg+ecx", "px+ef")
    >>> sentence = Sentence(("밥을", "먹지", "않는다"), (1, -1, 1), ("obj", "root", "aux"), lemmas, xpos=tags)
    >>> korean_negations(sentence)
    [Negation(negator=2, governor=1, scope=frozenset({0, 1}))]
    """
    found = []
    for word, (head, lemma, tags) in enumerate(zip(sentence.heads, sentence.lemmas, sentence.xpos, strict=True)):
        stem, tag = lemma.split("+")[0], tags.split("+")[0]
        auxiliary = stem in ("않", "못하", "말") and tag in ("px", "VX") and ROOT < head < word
        adverb = stem in ("안", "못", "아니") and tag in ("mag", "MAG") and head > word
        if auxiliary or adverb:
            below = _inner_subtree(sentence, head, word)
            found.append(Negation(word, head, frozenset({head, *(one for one in below if one < head)})))
    return found


def _inner_subtree(sentence: Sentence, top: int, without: int) -> set[int]:
    """The words below another by relations that are not OUTSIDE, without one of them and what is below that."""
    below, border = set[int](), {top}
    while border:
        below |= border
        border = {
            word
            for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True))
            if head in border and word not in below and word != without and _plain(relation) not in OUTSIDE
        }
    return below - {top}


def _plain(relation: str) -> str:
    """The universal part of a relation: nsubj of nsubj:pass."""
    return relation.partition(":")[0]


Fits = Callable[[Sentence, int], bool]


def _dependency(dependent: str, head: str, definition: str, fits: Fits) -> tuple[WordRelation, WordRelation]:
    """A dependency in both directions. From the head any of its fitting dependents is right."""

    def to_head(sentence: Sentence) -> Iterator[tuple[int, list[int]]]:
        for word, governor in enumerate(sentence.heads):
            if governor != ROOT and fits(sentence, word):
                yield word, [governor]

    def to_dependent(sentence: Sentence) -> Iterator[tuple[int, list[int]]]:
        dependents: dict[int, list[int]] = {}
        for word, (governor,) in to_head(sentence):
            dependents.setdefault(governor, []).append(word)
        yield from dependents.items()

    return (
        WordRelation(f"{dependent} → {head}", definition, to_head),
        WordRelation(f"{head} → {dependent}", definition, to_dependent),
    )


def _related(relations: Collection[str], *, upos: Collection[str] = (), head_upos: Collection[str] = ()) -> Fits:
    """Whether a word has one of these relations, and it and its head one of these parts of speech."""

    def fits(sentence: Sentence, word: int) -> bool:
        return (
            _plain(sentence.relations[word]) in relations
            and (not upos or sentence.upos[word] in upos)
            and (not head_upos or sentence.upos[sentence.heads[word]] in head_upos)
        )

    return fits


def _neighbours() -> tuple[WordRelation, WordRelation]:
    return (
        WordRelation(
            "next token", "the next word", lambda each: ((at, [at + 1]) for at in range(len(each.words) - 1)), True
        ),
        WordRelation(
            "previous token", "the word before", lambda each: ((at, [at - 1]) for at in range(1, len(each.words))), True
        ),
    )


def _negation(find: Callable[[Sentence], list[Negation]], definition: str) -> tuple[WordRelation, ...]:
    """Three relations: the negator to the negated word, the negator to its scope, each word of the scope to it."""

    def from_scope(sentence: Sentence) -> Iterator[tuple[int, set[int]]]:
        negators: dict[int, set[int]] = {}
        for negation in find(sentence):
            for word in negation.scope:
                negators.setdefault(word, set()).add(negation.negator)
        yield from negators.items()

    return (
        WordRelation(
            "negator → negated word", definition, lambda each: ((one.negator, [one.governor]) for one in find(each))
        ),
        WordRelation("negator → scope", definition, lambda each: ((one.negator, one.scope) for one in find(each))),
        WordRelation("scope → negator", definition, from_scope),
    )


def english_relations() -> tuple[WordRelation, ...]:
    """The relations of English sentences that textbooks show: neighbours, articles, subjects, objects, and more.

    Each dependency goes both ways. Copulas have no verb as head in UD, so "subject → verb" leaves out "She is tired".

    >>> [relation.name for relation in english_relations()][2:6]
    ['article → noun', 'noun → article', 'subject → verb', 'verb → subject']
    """

    def is_article(sentence: Sentence, word: int) -> bool:
        return sentence.relations[word] == "det" and sentence.lemmas[word].lower() in ("a", "an", "the")

    verb = ("VERB",)
    return (
        *_neighbours(),
        *_dependency("article", "noun", "det, of a, an or the", is_article),
        *_dependency("subject", "verb", "nsubj, of a VERB", _related(("nsubj",), head_upos=verb)),
        *_dependency("object", "verb", "obj, of a VERB", _related(("obj",), head_upos=verb)),
        *_dependency("preposition", "noun", "case, of an ADP", _related(("case",), upos=("ADP",))),
        *_negation(english_negations, "Polarity=Neg or PronType=Neg as advmod or det; see english_negations"),
    )


def korean_relations() -> tuple[WordRelation, ...]:
    """The relations of Korean sentences in eojeol: Korean has no articles, and its particles are parts of words.

    In place of articles there are determiners (이, 그, 한), in place of prepositions the particle of an adverbial (에,
    에서, 로; tags jca, JKB) with the predicate that it points to. Objects and topics stand before their predicate.

    >>> [relation.name for relation in korean_relations()][2:6]
    ['determiner → noun', 'noun → determiner', 'subject → predicate', 'predicate → subject']
    """

    def has_particle(*particles: str) -> Fits:
        def fits(sentence: Sentence, word: int) -> bool:
            return not set(particles).isdisjoint(sentence.xpos[word].split("+"))

        return fits

    adverbial, topic = has_particle("jca", "JKB"), has_particle("jxt")
    return (
        *_neighbours(),
        *_dependency("determiner", "noun", "det", _related(("det",))),
        *_dependency("subject", "predicate", "nsubj", _related(("nsubj",))),
        *_dependency("object", "predicate", "obj", _related(("obj",))),
        *_dependency("adverbial", "predicate", "a particle jca or JKB, such as 에", adverbial),
        *_dependency("topic", "predicate", "a particle jxt, 은 or 는", topic),
        *_dependency("modifier", "noun", "amod, acl, nmod", _related(("amod", "acl", "nmod"))),
        *_negation(korean_negations, "않다, 못하다, 말다, 안, 못, 아니; see korean_negations"),
    )


def repeated_nouns(first: Sentence, second: Sentence) -> list[RelationCase]:
    """Nouns of a sentence that stand once in the sentence before it: a proxy of reference across sentences.

    The words are those of both sentences, the second after the first. The query is a noun (NOUN or PROPN) of the
    second, the candidates are all nouns of the first, and right is the one with the same lemma, in Korean the same
    first morpheme. Only nouns with one right candidate among several count. The same word need not mean the same thing,
    and a pronoun or another noun that does is not found.

    Raises:
        ShapeError: a sentence without lemmas and parts of speech.

    >>> one = Sentence(("A", "dog", "saw", "cats"), (1, 2, -1, 2), ("det", "nsubj", "root", "obj"),
    ...     ("a", "dog", "see", "cat"), ("DET", "NOUN", "VERB", "NOUN"))
    >>> two = Sentence(("Dogs", "bark"), (1, -1), ("nsubj", "root"), ("dog", "bark"), ("NOUN", "VERB"))
    >>> repeated_nouns(one, two)[0].query, repeated_nouns(one, two)[0].candidates
    ((4, 4), ((1, 1), (3, 3)))
    """
    for sentence in (first, second):
        if not len(sentence.lemmas) == len(sentence.upos) == len(sentence.words):
            raise ShapeError(
                f"a sentence has {len(sentence.words)} words, {len(sentence.lemmas)} lemmas and {len(sentence.upos)} "
                "parts of speech: repeated nouns need both for each word, as read_conllu gives them"
            )
    before, here = dict(_nouns(first)), dict(_nouns(second))
    times = Counter(before.values())
    candidates = [(word, word) for word in before]
    return [
        RelationCase.of_choice((at, at), candidates, [list(before.values()).index(noun)])
        for word, noun in here.items()
        for at in [len(first.words) + word]
        if times[noun] == 1 and len(before) > 1
    ]


def _nouns(sentence: Sentence) -> Iterator[tuple[int, str]]:
    for word, (lemma, upos) in enumerate(zip(sentence.lemmas, sentence.upos, strict=True)):
        if upos in ("NOUN", "PROPN"):
            yield word, lemma.split("+")[0].lower()
