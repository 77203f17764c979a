"""Relations that textbooks name, on small sentences, and what a sentence needs for them."""

import pytest

from regard.errors import ConfigurationError, ShapeError
from regard.heads import (
    Negation,
    RelationCase,
    Sentence,
    english_negations,
    english_relations,
    korean_negations,
    korean_relations,
    parse_conllu,
    repeated_nouns,
)


def parsed(table):
    """A sentence from rows of: word, lemma, UPOS, XPOS, features, head, relation."""
    rows = [line.split() for line in table.strip().split("\n")]
    lines = [
        "\t".join([str(number), word, lemma, upos, xpos, features, head, relation, "_", "_"])
        for number, (word, lemma, upos, xpos, features, head, relation) in enumerate(rows, start=1)
    ]
    return next(parse_conllu(lines))


DOG = parsed("""
The     the     DET   DT  _             2  det
dog     dog     NOUN  NN  _             5  nsubj
did     do      AUX   VBD _             5  aux
n't     not     PART  RB  Polarity=Neg  5  advmod
eat     eat     VERB  VB  _             0  root
the     the     DET   DT  _             7  det
food    food    NOUN  NN  _             5  obj
in      in      ADP   IN  _             10 case
this    this    DET   DT  _             10 det
room    room    NOUN  NN  _             7  nmod
and     and     CCONJ CC  _             12 cc
slept   sleep   VERB  VBD _             5  conj
""")


def pairs(relations, sentence):
    """The query words and answers of each relation that has any, by name."""
    found = {relation.name: relation.cases(sentence) for relation in relations}
    return {name: [(case.query[0], sorted(case.answers)) for case in cases] for name, cases in found.items() if cases}


def test_english_relations():
    found = pairs(english_relations(), DOG)
    assert found.pop("next token") == [(at, [at + 1]) for at in range(11)]
    assert found.pop("previous token") == [(at, [at - 1]) for at in range(1, 12)]
    assert found == {
        "article → noun": [(0, [1]), (5, [6])],  # not "this room"
        "noun → article": [(1, [0]), (6, [5])],
        "subject → verb": [(1, [4])],
        "verb → subject": [(4, [1])],
        "object → verb": [(6, [4])],
        "verb → object": [(4, [6])],
        "preposition → noun": [(7, [9])],
        "noun → preposition": [(9, [7])],
        "negator → negated word": [(3, [4])],
        "negator → scope": [(3, [4, 5, 6, 7, 8, 9])],
        "scope → negator": [(word, [3]) for word in (4, 5, 6, 7, 8, 9)],
    }


def test_offsets_are_rules_but_of_relations_that_are_offsets():
    relations = {relation.name: relation for relation in english_relations()}
    assert relations["subject → verb"].cases(DOG)[0].rules == {"+3"}
    assert relations["negator → scope"].cases(DOG)[0].rules == {f"+{step}" for step in range(1, 7)}
    assert relations["next token"].cases(DOG)[0].rules == frozenset()


def test_a_determiner_negates_its_noun_and_a_clause_is_left_out():
    """No cat that sleeps, I hope, runs."""
    sentence = parsed("""
        No     no    DET   DT  PronType=Neg   2 det
        cat    cat   NOUN  NN  _              5 nsubj
        that   that  PRON  WDT _              4 nsubj
        sleeps sleep VERB  VBZ _              2 acl:relcl
        runs   run   VERB  VBZ _              0 root
        fast   fast  ADV   RB  _              5 advmod
        ,      ,     PUNCT ,   _              5 punct
        never  never ADV   RB  PronType=Neg   9 advmod
        walks  walk  VERB  VBZ _              5 conj
        Nobody nobody PRON NN  PronType=Neg   9 obj
    """)
    assert english_negations(sentence) == [Negation(0, 1, frozenset({1, 3})), Negation(7, 8, frozenset({8, 9}))]


def test_a_negator_without_a_head_negates_nothing():
    assert english_negations(parsed("Not not PART RB Polarity=Neg 0 root")) == []


KOREAN = parsed("""
    나는    나+는     PRON npp+jxt _ 4 dislocated
    학교에  학교+에   ADV  ncn+jca _ 3 advcl
    가지    가+지     VERB pvg+ecx _ 0 root
    않고    않+고     AUX  px+ecc  _ 3 aux
    동생이  동생+이   NOUN ncn+jcs _ 8 nsubj
    그      그        DET  mmd     _ 7 det
    밥을    밥+을     NOUN ncn+jco _ 8 obj
    먹었다  먹+었+다  VERB pvg+ep+ef _ 3 conj
    안      안        ADV  mag     _ 10 advmod
    갔다    가+았+다  VERB pvg+ep+ef _ 8 conj
""")


def test_korean_relations():
    found = pairs(korean_relations(), KOREAN)
    assert {name: cases for name, cases in found.items() if "token" not in name} == {
        "determiner → noun": [(5, [6])],
        "noun → determiner": [(6, [5])],
        "subject → predicate": [(4, [7])],
        "predicate → subject": [(7, [4])],
        "object → predicate": [(6, [7])],
        "predicate → object": [(7, [6])],
        "adverbial → predicate": [(1, [2])],
        "predicate → adverbial": [(2, [1])],
        "topic → predicate": [(0, [3])],
        "predicate → topic": [(3, [0])],
        "negator → negated word": [(3, [2]), (8, [9])],
        "negator → scope": [(3, [2]), (8, [9])],
        "scope → negator": [(2, [3]), (9, [8])],
    }


def test_the_scope_of_a_korean_negator_is_before_the_predicate():
    """나는 밥을 천천히 먹지 않았다: the object and the adverb, not the topic."""
    sentence = parsed("""
        나는    나+는    PRON npp+jxt   _ 4 dislocated
        밥을    밥+을    NOUN ncn+jco   _ 4 obj
        천천히  천천히   ADV  mag       _ 4 advmod
        먹지    먹+지    VERB pvg+ecx   _ 0 root
        않았다  않+았+다 AUX  px+ep+ef  _ 4 aux
    """)
    assert korean_negations(sentence) == [Negation(4, 3, frozenset({1, 2, 3}))]


def test_a_word_that_begins_like_a_negator_is_none():
    sentence = parsed("""
        말을    말+을   NOUN ncn+jco   _ 2 obj
        하다    하+다   VERB pvg+ef    _ 0 root
        못      못      NOUN ncn       _ 2 obj
    """)
    assert korean_negations(sentence) == []


def test_nouns_that_the_next_sentence_repeats():
    first = parsed("""
        Dogs  dog  NOUN NNS _ 2 nsubj
        chase chase VERB VBP _ 0 root
        cats  cat  NOUN NNS _ 2 obj
        and   and  CCONJ CC _ 5 cc
        cats  cat  NOUN NNS _ 3 conj
    """)
    second = parsed("""
        The   the  DET  DT  _ 2 det
        dog   dog  NOUN NN  _ 3 nsubj
        saw   see  VERB VBD _ 0 root
        cats  cat  NOUN NNS _ 3 obj
    """)
    case = RelationCase((6, 6), frozenset({0}), frozenset({"farthest"}), ((0, 0), (2, 2), (4, 4)))
    assert repeated_nouns(first, second) == [case]  # the cat stands twice before
    assert repeated_nouns(second, parsed("Rain rain NOUN NN _ 0 root")) == []


def test_a_choice_is_by_distance():
    case = RelationCase.of_choice((5, 6), [(0, 1), (8, 8), (3, 4)], [1])
    assert case.rules == frozenset()
    assert RelationCase.of_choice((5, 6), [(0, 1), (8, 8), (3, 4)], [2]).rules == {"nearest"}
    for answers in ([], [0, 1], [2]):
        with pytest.raises(
            ConfigurationError, match=r"of 2 candidates \[.*\] are right: there needs to be a right and a"
        ):
            RelationCase.of_choice((5, 5), [(0, 0), (1, 1)], answers)


def test_a_sentence_without_annotation():
    bare = Sentence(("a", "b"), (1, -1), ("det", "root"))
    for relation in (*english_relations(), *korean_relations()):
        with pytest.raises(ConfigurationError, match="has 2 words, and 0 / 0 / 0 / 0 lemmas, upos, xpos and features"):
            relation.cases(bare)
    with pytest.raises(ShapeError, match="a sentence has 2 words, 0 lemmas and 0 parts of speech"):
        repeated_nouns(DOG, bare)
