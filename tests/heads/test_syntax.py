"""CoNLL-U, weights between words, and the accuracy of heads on dependencies and coreference."""

import gzip

import pytest
import torch

from regard import heads
from regard.errors import ConfigurationError, CorpusError, ShapeError

CONLLU = """\
# sent_id = 1
# text = He can't sing songs.
1\tHe\the\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
2\tca\tcan\tAUX\t_\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\t_\tPolarity=Neg|Typo=Yes\t4\tadvmod\t_\t_
4\tsing\tsing\tVERB\t_\t_\t0\troot\t_\t_
4.1\tx\tx\tVERB\t_\t_\t_\t_\t_\t_
5\tsongs\tsong\tNOUN\t_\t_\t4\tobj\t_\tSpaceAfter=No
6\t.\t.\tPUNCT\t_\t_\t4\tpunct\t_\t_

1\tYes\tyes\tINTJ\t_\t_\t0\troot\t_\t_
"""
SENTENCE = heads.Sentence(
    ("He", "ca", "n't", "sing", "songs", "."),
    (3, 3, 3, -1, 3, 3),
    ("nsubj", "aux", "advmod", "root", "obj", "punct"),
    lemmas=("he", "can", "not", "sing", "song", "."),
    upos=("PRON", "AUX", "PART", "VERB", "NOUN", "PUNCT"),
    xpos=("_",) * 6,
    features=(frozenset(), frozenset(), frozenset({"Polarity=Neg", "Typo=Yes"}), *3 * (frozenset(),)),
    spaces=(True, False, True, True, False, True),
    identifier="1",
)
YES = heads.Sentence(
    ("Yes",), (-1,), ("root",), ("yes",), ("INTJ",), ("_",), (frozenset(),), spaces=(True,), identifier=""
)


@pytest.mark.parametrize("packed", [False, True])
def test_sentences_of_a_file(tmp_path, packed):
    path = tmp_path / "two.conllu"
    content = b"\xef\xbb\xbf" + CONLLU.replace("\n", "\r\n").encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    assert heads.read_conllu(path) == [SENTENCE, YES]
    assert SENTENCE.text == "He can't sing songs."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("5\tsongs\tsong\t", "5\tsongs\t", "line 9: 9 columns between tabs; CoNLL-U needs 10"),
        ("5\tsongs", "7\tsongs", "line 9: the word has the number '7'; it needs 5"),
        ("\t4\tobj", "\t_\tobj", "line 9: the head is '_'; it needs the number of a word, or 0"),
        ("\t4\tobj", "\t9\tobj", "line 10, the end of a sentence: a word has the head 9, and there are 6"),
    ],
)
def test_what_is_no_conllu(old, new, message):
    with pytest.raises(CorpusError, match=message):
        list(heads.parse_conllu(CONLLU.replace(old, new).split("\n")))


@pytest.mark.parametrize(
    "content", [None, b"\xff\xfe", gzip.compress(b"1\tx" * 99)[:20]], ids=["missing", "no UTF-8", "truncated"]
)
def test_files_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "broken"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"cannot read .*broken: .*; it needs CoNLL-U in UTF-8, plain or gzip"):
        heads.read_conllu(path)


def test_words_sum_over_keys_and_average_over_queries():
    weights = torch.randn(2, 3, 6, 6).softmax(-1)
    shown = heads.word_weights(weights, [None, 0, 0, 1, 3, -1])
    assert shown.shape == (2, 3, 4, 4)
    torch.testing.assert_close(shown[..., 0, 0], weights[..., 1:3, 1:3].sum(-1).mean(-1))
    torch.testing.assert_close(shown[..., 1, 0], weights[..., 3, 1:3].sum(-1))
    torch.testing.assert_close(shown[..., 0, 3], weights[..., 1:3, 4].mean(-1))
    assert shown[..., 2, :].eq(0).all()
    assert shown[..., 2].eq(0).all()
    across = heads.word_weights(weights, [0, 0, 0, 0, 0, 0], [None, None, 0, 0, 0, 1])
    torch.testing.assert_close(across[..., 0, 1], weights[..., 5].mean(-1))
    assert heads.word_weights(torch.zeros(0, 0), []).shape == (0, 0)


def test_words_are_as_many_as_tokens():
    with pytest.raises(ShapeError, match="for 3 tokens of queries and 4 of keys"):
        heads.word_weights(torch.ones(3, 3), [0, 1, 2], [0, 1, 2, 3])


def follows(targets):
    """A head in which each word attends to one word and to itself, equally."""
    return 0.5 * torch.nn.functional.one_hot(torch.tensor(targets), 6) + 0.5 * torch.eye(6)


def test_a_head_that_follows_a_relation():
    parse, back = [3, 3, 3, 4, 3, 3], [0, 0, 1, 2, 3, 4]
    between = torch.stack([follows(back), follows(parse)]).float()[None]
    evidence = heads.SyntaxEvidence.from_weights(between, SENTENCE)
    table = {(row.relation, row.direction): row for row in evidence.table()}
    assert len(table) == 10  # five relations, the root aside, in two directions
    subject = table["nsubj", "dependent to head"]
    assert (subject.head, subject.accuracy, subject.n, subject.offset, subject.baseline) == ((0, 1), 1.0, 1, 3, 1.0)
    assert table["obj", "head to dependent"].accuracy == 1.0
    assert table["obj", "head to dependent"].head == (0, 1)
    assert table["obj", "dependent to head"].head == (0, 0)  # both are right: the first
    assert evidence.accuracies("nsubj", "dependent to head").tolist() == [[0.0, 1.0]]
    assert evidence.accuracies("obj", "head to dependent").shape == (1, 2)


def test_the_baseline_is_the_best_offset_over_all_sentences():
    """Two determiners right before their head and one two words before: two of three."""
    sentences = [
        heads.Sentence(("the", "cat"), (1, -1), ("det", "root")),
        heads.Sentence(("a", "dog"), (1, -1), ("det", "root")),
        heads.Sentence(("the", "big", "cat"), (2, 2, -1), ("det", "amod", "root")),
    ]
    parts = [heads.SyntaxEvidence.from_weights(torch.ones(4, len(s.words), len(s.words)), s) for s in sentences]
    row = next(row for row in heads.SyntaxEvidence.total(parts).table() if row.relation == "det")
    assert (row.offset, row.n) == (1, 3)
    assert row.baseline == pytest.approx(2 / 3)
    assert row.accuracy == pytest.approx(2 / 3)  # of equal weights the first other word
    assert (parts[0] + parts[1]).table()[0].n == 2
    assert len(heads.SyntaxEvidence.total(parts).table(least=2)) == 2


def test_one_of_several_dependents_is_enough():
    sentence = heads.Sentence(("a", "b", "c"), (1, -1, 1), ("conj", "root", "conj"))
    between = torch.zeros(1, 3, 3)
    between[0, 1, 2] = 1
    row = heads.SyntaxEvidence.from_weights(between, sentence).table()[1]
    assert (row.direction, row.n, row.accuracy, row.baseline) == ("head to dependent", 1, 1.0, 1.0)


def test_a_head_may_be_chosen_on_other_sentences():
    right = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    sentence = heads.Sentence(("a", "b"), (1, -1), ("det", "root"))
    chosen = heads.SyntaxEvidence.from_weights(torch.stack([right, 0 * right]), sentence)
    kept = heads.SyntaxEvidence.from_weights(torch.stack([0 * right, right]), sentence)
    assert [row.accuracy for row in kept.table()] == [1.0, 1.0]
    assert [row.accuracy for row in kept.table(chosen_on=chosen)] == [0.0, 0.0]
    assert [row.head for row in kept.table(chosen_on=chosen)] == [(0,), (0,)]


def test_evidence_that_does_not_fit():
    evidence = heads.SyntaxEvidence.from_weights(torch.ones(2, 6, 6), SENTENCE)
    with pytest.raises(ShapeError, match=r"for 6 words; they need \(..., 6, 6\)"):
        heads.SyntaxEvidence.from_weights(torch.ones(2, 5, 5), SENTENCE)
    with pytest.raises(ShapeError, match="does not add up"):
        heads.SyntaxEvidence.total([evidence, heads.SyntaxEvidence.from_weights(torch.ones(3, 6, 6), SENTENCE)])
    with pytest.raises(ConfigurationError, match="there is no evidence to add up"):
        heads.SyntaxEvidence.total([])
    with pytest.raises(ConfigurationError, match="relations are advmod, aux, nsubj, obj, punct; directions are 'dep"):
        evidence.accuracies("det", "dependent to head")
    with pytest.raises(ConfigurationError, match="there is no evidence on 'obj', 'backwards'"):
        evidence.accuracies("obj", "backwards")  # type: ignore[arg-type]


def test_an_antecedent_is_found():
    """[the doctor] told [the nurse] that [she]: the first head attends to the doctor, the second to the nurse."""
    between = torch.zeros(2, 7, 7)
    between[0, 6, :2], between[0, 6, 4] = 0.3, 0.5  # two words of the doctor have more than one of the nurse
    between[1, 6, 4] = 1.0
    clusters = [[(0, 1), (6, 6)], [(3, 4)]]
    found = heads.CoreferenceEvidence.from_weights(between, clusters)
    assert (found.n, found.nearest, found.chance) == (1, 0, 0.5)
    assert found.accuracies.tolist() == [1.0, 0.0]
    other = heads.CoreferenceEvidence.from_weights(between, [[(0, 1)], [(3, 4), (6, 6)]])
    both = heads.CoreferenceEvidence.total([found, other])
    assert both.accuracies.tolist() == [0.5, 0.5]
    assert str(both) == "head 0: 50.0% of 2 mentions, nearest mention 50.0%, by chance 50.0%"


def test_mentions_without_a_choice_are_not_counted():
    between = torch.ones(1, 6, 6)
    nothing = heads.CoreferenceEvidence.from_weights(between, [[(0, 0), (2, 2), (3, 5)]])
    assert nothing.n == 0
    assert nothing.accuracies.isnan().all()
    assert str(nothing) == "no mention with a choice was counted"
    # Of mentions that overlap none is before the other; a later one is no candidate.
    assert heads.CoreferenceEvidence.from_weights(between, [[(1, 3), (2, 4)], [(0, 0)]]).n == 0
    assert heads.CoreferenceEvidence.from_weights(between, [[(0, 0), (2, 2)], [(4, 4)]]).n == 0


def test_mentions_that_do_not_fit():
    with pytest.raises(ShapeError, match="each mention its first and last word in 0 to 3"):
        heads.CoreferenceEvidence.from_weights(torch.ones(1, 4, 4), [[(0, 4)]])
    with pytest.raises(ShapeError, match="they need a square of words"):
        heads.CoreferenceEvidence.from_weights(torch.ones(1, 4, 5), [])
    with pytest.raises(ConfigurationError, match="there is no evidence to add up"):
        heads.CoreferenceEvidence.total([])
    with pytest.raises(ShapeError, match="does not add up"):
        heads.CoreferenceEvidence.total(
            heads.CoreferenceEvidence.from_weights(torch.ones(number, 2, 2), []) for number in (1, 2)
        )
