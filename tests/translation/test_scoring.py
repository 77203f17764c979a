import pytest
import sacrebleu

from regard.errors import ConfigurationError, CorpusError
from regard.translation.scoring import Scores, exact_match, score

HYPOTHESES = ["The dog runs through the snow .", "Two men are sitting on a bench.", "A girl is singing."]
REFERENCES = ["A dog runs through the snow.", "Two men sit on a bench.", "A girl sings a song."]


def test_the_scores_are_those_of_sacrebleu():
    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert scores.chrf == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert 0 < scores.bleu < 100


def test_signatures_say_how():
    scores = score(HYPOTHESES, REFERENCES)
    version = sacrebleu.__version__
    assert scores.bleu_signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert scores.chrf_signature == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"


def test_perfect_translations_have_a_hundred():
    scores = score(REFERENCES, REFERENCES)
    assert (scores.bleu, scores.chrf) == (pytest.approx(100), pytest.approx(100))


def test_case_counts_unless_told():
    loud = [line.upper() for line in REFERENCES]
    assert score(loud, REFERENCES).bleu < 50
    scores = score(loud, REFERENCES, lowercase=True)
    assert (scores.bleu, scores.chrf) == (pytest.approx(100), pytest.approx(100))
    assert "case:lc" in scores.bleu_signature
    assert "case:lc" in scores.chrf_signature


def test_another_tokeniser():
    scores = score(["我喜欢猫。"], ["我喜欢狗。"], tokenize="zh")
    assert "tok:zh" in scores.bleu_signature
    assert scores.bleu > 0


def test_two_lines_to_print():
    scores = Scores(bleu=33.4567, chrf=7.0, bleu_signature="nrefs:1|tok:13a", chrf_signature="nc:6")
    assert str(scores) == "BLEU 33.46  nrefs:1|tok:13a\nchrF  7.00  nc:6"


def test_exact_match():
    assert exact_match(["a", "b", "c"], ["a", "b", "d"]) == pytest.approx(2 / 3)
    assert exact_match(["A"], ["a"]) == 0


@pytest.mark.parametrize("measure", [score, exact_match])
def test_unequal_counts(measure):
    with pytest.raises(CorpusError, match="there are 3 hypotheses and 2 references; line i of one needs to belong"):
        measure(HYPOTHESES, REFERENCES[:2])


@pytest.mark.parametrize("measure", [score, exact_match])
def test_nothing_to_score(measure):
    with pytest.raises(CorpusError, match="there is nothing to score: no hypotheses and no references; it needs at"):
        measure([], [])


@pytest.mark.parametrize("measure", [score, exact_match])
def test_one_text_is_no_list(measure):
    with pytest.raises(CorpusError, match="hypotheses is one text, 'abc'; it needs to be a list of lines"):
        measure("abc", "abd")


def test_an_unknown_tokeniser():
    with pytest.raises(ConfigurationError, match="tokenize is '13b'; did you mean '13a'"):
        score(HYPOTHESES, REFERENCES, tokenize="13b")


@pytest.mark.parametrize("error", [RuntimeError("Please\ninstall mecab"), ImportError("Please install mecab")])
def test_a_tokeniser_whose_package_is_missing(monkeypatch, error):
    def fail(**settings):
        raise error

    fail.TOKENIZERS = ["ja-mecab"]
    monkeypatch.setattr("regard.translation.scoring.BLEU", fail)
    with pytest.raises(ConfigurationError, match="tokenize='ja-mecab' cannot be used here: Please install mecab"):
        score(HYPOTHESES, REFERENCES, tokenize="ja-mecab")
