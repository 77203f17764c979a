import math
import sys

import pytest
import sacrebleu

from regard.errors import ConfigurationError, CorpusError, MissingExtra
from regard.translation.bleu import Scores, exact_match, score, tokenised_bleu

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
    monkeypatch.setattr("regard.translation.bleu.BLEU", fail)
    with pytest.raises(ConfigurationError, match="tokenize='ja-mecab' cannot be used here: Please install mecab"):
        score(HYPOTHESES, REFERENCES, tokenize="ja-mecab")


# What multi-bleu.perl and fairseq count: n-grams of tokens, the geometric mean of four precisions, no smoothing.
PAIR = (["Das ist gut, z.B. hier & dort."], ["Das ist gut, z.B. dort & hier."])


def test_tokenised_bleu_is_of_the_tokens_of_moses():
    # Das ist gut , z.B. hier & dort .
    # Das ist gut , z.B. dort & hier . have 9 of 9 words, the first 4 of 8 pairs, 3 of 7 triples, 2 of 6 quadruples.
    score, signature = tokenised_bleu(*PAIR, language="de")
    assert score == pytest.approx(100 * (9 / 9 * 4 / 8 * 3 / 7 * 2 / 6) ** (1 / 4))
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:moses-de|smooth:none|version:")
    assert "|sacremoses:" in signature


def test_tokenised_bleu_has_the_brevity_penalty_and_no_smoothing():
    score, _ = tokenised_bleu(["Er geht nach Hause"], ["Er geht nach Hause."], language="de")
    assert score == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert tokenised_bleu(["Er geht heim."], ["Er geht nach Hause."], language="de")[0] == 0


def test_tokenised_bleu_without_regard_to_case():
    loud = [line.upper() for line in PAIR[1]]
    score, signature = tokenised_bleu(loud, PAIR[1], language="de", lowercase=True)
    assert score == pytest.approx(100)
    assert "|case:lc|" in signature


def test_the_language_decides_where_a_full_stop_is_one():
    said, meant = ["Gestern kam er mit ihr am 3. Mai an"], ["Gestern kam er mit ihr am 4. Mai an"]
    german, english = (tokenised_bleu(said, meant, language=language)[0] for language in ("de", "en"))
    assert german == pytest.approx(100 * (8 / 9 * 6 / 8 * 4 / 7 * 3 / 6) ** (1 / 4))  # 3. is one token of nine
    assert english == pytest.approx(100 * (9 / 10 * 7 / 9 * 5 / 8 * 3 / 7) ** (1 / 4))  # 3 and . are two of ten


def test_tokenised_bleu_needs_lines_and_its_extra(monkeypatch):
    with pytest.raises(CorpusError, match="there are 3 hypotheses and 2 references; line i of one needs to belong"):
        tokenised_bleu(HYPOTHESES, REFERENCES[:2], language="en")
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(
        MissingExtra, match=r"needs the package 'sacremoses', .* pip install 'regard\[moses\]' brings it"
    ):
        tokenised_bleu(HYPOTHESES, REFERENCES, language="en")
