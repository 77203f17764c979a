"""What docs/transformer.md shows of the translator that comes with regard: the drawing, and the parts switched off."""

import runpy
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN

ROOT = Path(__file__).parents[2]
PARTS = runpy.run_path(str(ROOT / "recipes" / "parts_of_a_transformer.py"))["PARTS"]
PAGES = ["transformer", "from-bahdanau-to-today", "measured-claims", "lecture-notes"]


@pytest.fixture(scope="module")
def translator():
    return Translator.load(ENGLISH_FRENCH)


@pytest.fixture
def changed(translator):
    def change(name: str) -> Any:
        model = deepcopy(translator.model)
        PARTS[name](model)
        return model

    return change


def batch(translator, *lines):
    rows = [translator.source_vocabulary.encode(line) for line in lines]
    lengths = torch.tensor([len(row) for row in rows])
    source = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, tokens in zip(source, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    target = [BEGIN, *translator.target_vocabulary.encode("Je suis très fatigué.")]
    return source, lengths, torch.tensor([target] * len(rows))


def test_the_drawing_is_that_of_the_model(tmp_path, monkeypatch):
    drawn = tmp_path / "drawn.svg"
    monkeypatch.setattr("sys.argv", ["transformer_drawing.py", str(drawn)])
    runpy.run_path(str(ROOT / "recipes" / "transformer_drawing.py"), run_name="__main__")
    committed = ROOT / "docs" / "pictures" / "transformer.svg"
    assert drawn.read_text("utf-8") == committed.read_text("utf-8"), "run python recipes/transformer_drawing.py"


def test_the_page_has_a_row_for_each_part():
    page = (ROOT / "docs" / "transformer.md").read_text("utf-8")
    assert [name for name in PARTS if f"\n| {name} |" not in page] == []


@pytest.mark.parametrize("name", PARTS)
def test_each_part_changes_what_is_predicted(translator, changed, name):
    given = batch(translator, "I am very tired.")
    with torch.no_grad():
        before, after = translator.model(*given), changed(name)(*given)
    assert torch.equal(before, after) is (name == "the whole model")


def test_without_cross_attention_the_source_makes_no_difference(translator, changed):
    with torch.no_grad():
        first, second = changed("no cross-attention")(*batch(translator, "I am very tired.", "He reads a book."))
    assert torch.equal(first, second)


def test_without_self_attention_a_token_of_the_encoder_knows_itself_alone(translator, changed):
    model = changed("no self-attention in the encoder")
    source, lengths, _ = batch(translator, "I am very tired.")
    other = source.clone()
    other[0, 0] = source[0, 2]
    with torch.no_grad():
        keys = [model.encode(tokens, lengths).layers[0].keys for tokens in (source, other)]
    torch.testing.assert_close(keys[0][..., 1:, :], keys[1][..., 1:, :])
    assert not torch.allclose(keys[0][..., :1, :], keys[1][..., :1, :])


def test_without_positions_a_token_is_embedded_alike_everywhere(translator, changed):
    rows = changed("no positions").source_embedding(torch.tensor([[7, 9, 7]]))[0]
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("name", ["no residual paths, norm(f(x))", "no norms, x + f(x)"])
def test_residual_connections_lose_what_they_are_said_to_lose(changed, name):
    residual = changed(name).encoder.blocks[0].feed_forward_residual
    x, branch = torch.randn(2, 3, 192).unbind()
    expected = residual.norm(branch) if "paths" in name else x + branch
    torch.testing.assert_close(residual.after(x, branch), expected)


@pytest.mark.parametrize(("suffix", "word"), [("", "Next: ["), (".ko", "다음: [")])
@pytest.mark.parametrize("page", PAGES)
def test_each_page_names_its_next(page, suffix, word):
    last = (ROOT / "docs" / f"{page}{suffix}.md").read_text("utf-8").rstrip().rsplit("\n\n", 1)[1]
    assert last.startswith(word)
    following = PAGES[PAGES.index(page) + 1] if page != PAGES[-1] else "every-mechanism"
    assert f"]({following}.md)" in last


def test_the_plain_dot_product_falls_behind_with_its_width():
    """What the page's table of a hundred updates and three seeds shows, after fifty and with one."""
    recipe = runpy.run_path(str(ROOT / "recipes" / "additive_against_dot.py"))
    torch.manual_seed(0)
    for width in (16, 256):
        model = recipe["Recall"]("q·k", width)
        asked = torch.arange(recipe["SYMBOLS"])
        with torch.no_grad():
            query, key = model.projections[0](model.asking(asked)), model.projections[1](model.asked(asked))
            assert (query @ key.T).std() == pytest.approx(width**0.5, rel=0.2)
    right = {score: recipe["trained"](score, 256, 3e-3, seed=0, updates=50) for score in recipe["SCORES"]}
    assert right["q·k/√d"] > right["q·k"] + 20
    assert right["additive"] > right["q·k"] + 20
