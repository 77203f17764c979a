"""BLEU and chrF by sacreBLEU, with the signatures that make scores comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.errors import ConfigurationError, CorpusError, nearest, require


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF of a corpus, in percent, each with its signature; `str` gives a line for each.

    A signature says how a score was computed: without it, two scores cannot be compared.
    """

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str

    def __str__(self) -> str:
        """A line for each score."""
        return f"BLEU {self.bleu:5.2f}  {self.bleu_signature}\nchrF {self.chrf:5.2f}  {self.chrf_signature}"


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> Scores:
    """BLEU and chrF2 of detokenised `hypotheses`, each against one reference.

    `tokenize` names one of sacreBLEU's tokenisers for BLEU: "13a" for languages that put spaces between words, "zh",
    "ja-mecab" and "ko-mecab" for those three (the latter two need packages of their own), "char" for any. Both scores
    see the text in lower case if `lowercase` is true.

    Sources: Papineni et al. 2002, BLEU; Popović 2015, chrF; Post 2018, A Call for Clarity in Reporting BLEU Scores.

    Raises:
        CorpusError: there are no lines, or not as many hypotheses as references.
        ConfigurationError: `tokenize` is unknown, or needs a package that is not installed.

    >>> print(score(["the cat sat on the mat"], ["the cat sat on a mat"]))  # doctest: +ELLIPSIS
    BLEU 53.73  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...
    chrF 72.08  nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:...
    """
    _check(hypotheses, references)
    bleu, chrf = _bleu(lowercase, tokenize), CHRF(lowercase=lowercase)
    return Scores(
        bleu=bleu.corpus_score(hypotheses, [references]).score,
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def sentence_quality(hypothesis: str, reference: str) -> float:
    """Measure one translation: chrF / 100, in 0..1.

    Source: Popović 2015, chrF: character n-gram F-score for automatic MT evaluation.

    >>> sentence_quality("Bonjour !", "Bonjour !"), sentence_quality("Merci.", "Bonjour !") < 0.1
    (1.0, True)
    """
    return CHRF().sentence_score(hypothesis, [reference]).score / 100


def tokenised_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, language: str, lowercase: bool = False
) -> tuple[float, str]:
    """BLEU of tokenised text as multi-bleu.perl and fairseq score it, in percent, and its signature.

    Both sides are raw text; they are brought to lower case if `lowercase` is true, then tokenised by the rules of Moses
    for `language` ("de"), and nothing is smoothed. For comparison with publications that scored text in such tokens:
    between ways to tokenise, scores differ. What those tokens were lower-cased needs `lowercase` here.

    Raises:
        CorpusError: as `score`.
        MissingExtra: sacremoses is not installed.
    """
    _check(hypotheses, references)
    sacremoses = require("sacremoses", extra="moses")
    tokenise = sacremoses.MosesTokenizer(language).tokenize
    tokenised = [
        [" ".join(tokenise(line.lower() if lowercase else line, escape=False)) for line in side]
        for side in (hypotheses, references)
    ]
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    score = bleu.corpus_score(tokenised[0], [tokenised[1]]).score
    said = {"case": "lc" if lowercase else "mixed", "tok": f"moses-{language}"}
    parts = (part.partition(":") for part in str(bleu.get_signature()).split("|"))
    signature = [f"{name}:{said.get(name, value)}" for name, _, value in parts]
    return score, "|".join([*signature, f"sacremoses:{sacremoses.__version__}"])


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The fraction of the hypotheses, 0 to 1, that equal their reference exactly.

    Raises:
        CorpusError: there are no lines, or not as many hypotheses as references.

    >>> exact_match(["2020-03-14", "1969-07-21"], ["2020-03-14", "1969-07-20"])
    0.5
    """
    _check(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    return sum(hypothesis == reference for hypothesis, reference in pairs) / len(references)


def check_tokenizer(tokenize: str) -> None:
    """Make sure that a tokeniser of `score` can be used.

    Raises:
        ConfigurationError: it is unknown, or needs a package that is not installed.
    """
    _bleu(lowercase=False, tokenize=tokenize)


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, lines in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(lines, str):
            raise CorpusError(f"{name} is one text, {lines[:40]!r}; it needs to be a list of lines")
    if len(hypotheses) != len(references):
        raise CorpusError(
            f"there are {len(hypotheses):,} hypotheses and {len(references):,} references; "
            "line i of one needs to belong to line i of the other"
        )
    if not references:
        raise CorpusError("there is nothing to score: no hypotheses and no references; it needs at least one line")


def _bleu(lowercase: bool, tokenize: str) -> BLEU:
    if tokenize not in BLEU.TOKENIZERS:
        raise ConfigurationError(f"tokenize is {tokenize!r}; {nearest(tokenize, BLEU.TOKENIZERS)}")
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize)
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"tokenize={tokenize!r} cannot be used here: {reason}") from error
