"""The recipe of docs/what-heads-learn.md: its readers, and its tables and figure, on small texts and a tiny model."""

import csv
import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from regard.heads import RelationCase, RelationEvidence, RelationScore, Sentence, english_relations
from regard.translation.build_model import build_model
from regard.translation.settings import SearchSettings, TransformerSettings
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings

pytest.importorskip("transformers")

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
annotated_texts = importlib.import_module("annotated_texts")
recipe = importlib.import_module("roles_of_heads")

TREE = """\
# sent_id = one-{number:04}
1\tThe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\tdog\tdog\tNOUN\tNN\t_\t3\tnsubj\t_\t_
3\tate\teat\tVERB\tVBD\t_\t5\tccomp\t_\t_
4-5\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
4\tdo\tdo\tAUX\tVBP\t_\t5\taux\t_\t_
5\tn't\tnot\tPART\tRB\tPolarity=Neg\t3\tadvmod\t_\t_
6\tbread\tbread\tNOUN\tNN\t_\t3\tobj\t_\tSpaceAfter=No
7\t.\t.\tPUNCT\t.\t_\t3\tpunct\t_\t_

"""


@pytest.fixture(scope="module")
def tiny():
    """An untrained translator of two layers of two heads."""
    torch.manual_seed(0)
    lines = ["The dog ate don't bread.", "a cat, too!"]
    vocabulary = Vocabulary.train(lines, VocabularySettings(kind="bpe", size=40))
    settings = TransformerSettings(dim=8, hidden_dim=16, num_heads=2, encoder_layers=2, decoder_layers=1)
    model = build_model(settings, len(vocabulary), len(vocabulary))
    return recipe.TranslatorEncoder(Translator(model, vocabulary, vocabulary, SearchSettings()))


@pytest.fixture
def ewt(tmp_path):
    path = tmp_path / "ewt.conllu.gz"
    path.write_bytes(gzip.compress("".join(TREE.format(number=number) for number in range(1, 5)).encode()))
    return path


def test_tokens_belong_to_the_word_of_their_first_character(tiny):
    sentence = Sentence(("do", "n't", "☃☃", "."), (-1,) * 4, ("root",) * 4, spaces=(False, True, False, False))
    ids = tiny.vocabulary.encode(sentence.text)
    numbers = recipe.word_numbers(tiny.vocabulary, ids, sentence.words)
    letters = dict.fromkeys(range(4), "")
    for number, token in zip(numbers, tiny.vocabulary.tokens(ids), strict=True):
        letters[number] += token
    assert letters[2].count("<unk>") == 2
    assert letters[3] == "."
    assert letters[0].startswith("▁d")
    with pytest.raises(ValueError, match="the tokens have .* characters and the words .* have"):
        recipe.word_numbers(tiny.vocabulary, ids, ["do", "not"])


def test_a_text_of_unknown_letters_is_not_read(tiny):
    assert tiny.between(annotated_texts.plain(["나는", "학생이다", "."])) is None
    between = tiny.between(annotated_texts.plain(["The", "dog", "."]))
    assert between.shape == (2, 2, 3, 3)
    torch.testing.assert_close(between.sum(-1), torch.ones(2, 2, 3))


def test_from_a_treebank_to_tables(tiny, ewt, tmp_path, monkeypatch):
    texts = [("UD English EWT", lambda: annotated_texts.treebank(ewt, english_relations(), 40))]
    monkeypatch.setattr(recipe.Subject, "texts", lambda self, data: ((name, make()) for name, make in texts))
    monkeypatch.setattr(recipe, "LEAST", 2)
    models = [tiny]
    subject = recipe.Subject("tiny", "en", 40, lambda data, runs: models.pop())
    other = recipe.Subject("other", "ko", 40, subject.load)
    monkeypatch.setattr(recipe, "SUBJECTS", {"tiny": subject, "other": other})
    rows = recipe.measured("tiny", tmp_path, tmp_path, tmp_path / "results")
    again = recipe.measured("tiny", tmp_path, tmp_path, tmp_path / "results")  # the model is gone: from the file
    assert [str(row) for row in again] == [str(row) for row in rows]
    found = {row.relation: row.score for row in rows}
    assert (found["next token"].n, found["article → noun"].n, found["negator → scope"].n) == (12, 2, 2)
    assert found["article → noun"].rule == "+1"
    assert found["article → noun"].baseline == 1.0
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tiny -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    recipe.write_tables(page, {"tiny": recipe.table(rows, recipe.KOREAN)})
    text = page.read_text("utf-8")
    assert text.startswith("before\n<!-- tiny -->\n\n| 관계 | 말뭉치 | 헤드 |")
    assert "| 관사 → 명사 | UD English EWT | " in text
    assert text.endswith("|\n\n<!-- end -->\nafter\n")
    assert "old" not in text
    with pytest.raises(ValueError, match="has no place for the table other"):
        recipe.write_tables(page, {"other": ""})


def test_a_row_says_where_the_interval_is_above_0():
    score = RelationScore((2, 8), 0.813, (0.78, 0.84), "+1", 0.6, (0.17, 0.25), 0.05, 1234, 9, 0.66, 500)
    row = recipe.Row("article → noun", "UD English EWT", score)
    assert row.markdown({}) == (
        "| article → noun | UD English EWT | 2-8 | 81.3 [78.0, 84.0] | +1 60.0 | **+21.3 [17.0, 25.0]** | 66.0 (500) "
        "| 1,234 |"
    )
    saved = json.loads(json.dumps({"relation": row.relation, "corpus": row.corpus, **score.__dict__}))
    assert recipe.Row.read(saved) == row
    assert "66.0" in row.markdown(recipe.KOREAN)


def test_all_relations_have_a_korean_name():
    names = {relation.name for relation in (*english_relations(), *recipe.heads.korean_relations())}
    assert names <= recipe.KOREAN.keys()


def test_nouns_repeated_in_the_next_sentence(ewt):
    texts = [text for text in annotated_texts.treebank(ewt, [], 40) if text.cases]
    assert len(texts) == 3
    case = texts[0].cases["noun → same noun, sentence before"][0]
    assert [texts[0].sentence.words[first] for first, _ in (case.query, *case.candidates)] == ["dog", "dog", "bread"]
    assert texts[0].sentence.text == "The dog ate don't bread. The dog ate don't bread."


@pytest.mark.parametrize(
    ("first", "second", "follow"),
    [
        ("a-b-0001", "a-b-0002", True),
        ("M-s9", "M-s10", True),
        ("a-1", "b-2", False),
        ("a-1", "a-3", False),
        ("", "", False),
    ],
)
def test_which_sentences_follow_each_other(first, second, follow):
    assert annotated_texts._follows(first, second) is follow


def test_pronouns_and_names(tmp_path):
    text = "Mr. Jo Ray met Ann Lee. Jo Ray told Ann Lee that she won. She left."
    fields = ["ID", "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref"]
    rows = [
        ["x", text, "she", text.index("she"), "Jo Ray", 24, "FALSE", "Ann Lee", 36, "TRUE"],
        ["y", text, "She", text.index("She"), "Jo Ray", 24, "TRUE", "Ann Lee", 36, "TRUE"],  # both
        ["z", text, "She", text.index("She"), "Jo Ray", 4, "FALSE", "Ann Lee", 15, "TRUE"],
    ]
    with gzip.open(tmp_path / "gap.tsv.gz", "wt", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([fields, *rows])
    texts = list(annotated_texts.gap(tmp_path / "gap.tsv.gz"))
    assert [text.group for text in texts] == ["x", "z"]
    assert [list(text.cases)[1] for text in texts] == [
        "pronoun → name, both in its sentence",
        "pronoun → name, both in sentences before",
    ]
    case = texts[0].cases["pronoun → name"][0]
    words = texts[0].sentence.words
    assert [words[first : last + 1] for first, last in case.candidates] == [("Jo", "Ray"), ("Ann", "Lee")]
    assert (words[case.query[0]], case.rules) == ("she", {"nearest"})
    assert texts[0].sentence.text == text


def test_schemas(tmp_path):
    lines = [
        "sentid\tsentence",
        "technician.customer.1.male.txt\tThe technician told the customer that he could pay.",
        "technician.someone.0.male.txt\tThe technician told someone that he had finished.",
    ]
    path = tmp_path / "schemas.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    texts = list(annotated_texts.winogender(path))
    assert {text.group for text in texts} == {"technician"}
    cases = [text.cases["pronoun → person"][0] for text in texts]
    assert [case.candidates for case in cases] == [((0, 1), (3, 4)), ((0, 1), (3, 3))]
    assert [case.rules for case in cases] == [{"nearest"}, {"farthest"}]


@pytest.mark.parametrize("language", ["en", "ko"])
def test_pairs_of_synonyms(language):
    texts = list(annotated_texts.synonyms(language))
    for name in ("word → synonym", "word → same word", "word → synonym, not antonym"):
        cases = [text.cases[name][0] for text in texts if name in text.cases]
        assert len(cases) >= 90
        for rule in ("nearest", "farthest"):
            assert sum(rule in case.rules for case in cases) == len(cases) / 2
    groups = list(dict.fromkeys(text.group for text in texts))
    shared = [text for text in texts if "word → synonym, not antonym" not in text.cases]
    halves = [{words(text) for text in shared if text.group in groups[half::2]} for half in (0, 1)]
    assert not set().union(*halves[0]) & set().union(*halves[1])


def words(text):
    """The three words of a frame, with its kind: "answer" is a noun and a verb."""
    case = next(iter(text.cases.values()))[0]
    kind = text.group.split()[0]
    return frozenset((kind, text.sentence.words[first]) for first, _ in (case.query, *case.candidates))


def test_variants_of_a_text_are_one(tiny):
    sentence = annotated_texts.plain(["The", "dog", "ate", "."])
    cases = {"x": [RelationCase.of_word(0, [1])]}
    texts = [annotated_texts.AnnotatedText(sentence, cases, group) for group in ("a", "a", "b")]
    found = recipe.gather(tiny, [*texts, annotated_texts.AnnotatedText(sentence, {"x": []}, "c")])
    assert isinstance(found["x"], RelationEvidence)
    assert found["x"].texts.tolist() == [0, 0, 1]
    assert recipe.scores(found) == {}  # too few cases
