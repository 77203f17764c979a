import pytest
import torch
from test_translator import ENGLISH, reverser

from regard.errors import CorpusError
from regard.translation.input_lines import cut_line
from regard.translation.translated_line import Candidate, join_candidates


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("One. Two.", ["One. Two."]),
        ("One two. Three four? Five six!", ["One two.", "Three four?", "Five six!"]),
        ('He said: "No." She left at 5 p.m. and he stayed.', ['He said: "No."', "She left at 5 p.m. and he stayed."]),
        ("あ。い。う。", ["あ。い。う。"]),
        ("a b c d e f g h i j k l", ["a b c d e", "f g h i j k l"]),
        ("  a b c d, e f g h i j k ", ["a b c d,", "e f g h i j k"]),
    ],
)
def test_lines_are_cut_at_ends_of_sentences_and_long_sentences_near_their_middle(line, parts):
    assert cut_line(line, words, above=5, longest=8) == parts


def test_text_without_spaces_is_cut_at_its_marks_or_anywhere():
    assert cut_line("あ。い。う。", len, above=3, longest=4) == ["あ。", "い。", "う。"]
    assert cut_line("x" * 10, len, above=3, longest=4) == ["xx", "xxx", "xx", "xxx"]


def test_nothing_of_a_line_is_lost():
    line = " ".join(f"word{number}{'.,;'[number % 3] if number % 7 == 0 else ''}" for number in range(3000))
    parts = cut_line(line, words, above=20, longest=40)
    assert " ".join(parts) == line
    assert max(map(words, parts)) <= 40
    assert len(parts) < 300


def test_a_long_line_is_translated_in_parts_and_says_so():
    translator = reverser(ENGLISH)
    line = " ".join(["a dog runs the cat"] * 3)
    whole, [parted, short] = translator.translate([line])[0], translator.translate([line, "a dog"], split_above=4)
    assert whole.text == " ".join(["cat the runs dog a"] * 3)
    assert parted.text == " ".join(" ".join(reversed(part.split())) for part in cut_line(line, words, 4, 8))
    assert parted.warnings == (
        "line 1: it has 15 tokens, more than are translated at once, and is translated in 2 parts, each by itself; "
        "give one sentence a line",
    )
    assert (short.text, short.warnings) == ("dog a", ())
    assert parted.source_tokens == whole.source_tokens
    candidate = parted.candidates[0]
    assert candidate.tokens == (*parted.text.split(), "</s>")
    assert candidate.weights.shape == (16, 15)
    torch.testing.assert_close(candidate.weights.sum(-1), torch.ones(16))


def test_a_model_with_a_longest_source_takes_any_line_in_parts():
    translator = reverser(ENGLISH, max_source_length=4)
    [translation] = translator.translate(["a cat sees the dog a cat"], split_above=100)
    assert sorted(translation.text.split()) == sorted(["a", "cat", "sees", "the", "dog", "a", "cat"])
    with pytest.raises(CorpusError, match="line 1 has 7 tokens and this model allows 4"):
        translator.translate(["a cat sees the dog a cat"])


def test_the_best_combinations_of_the_parts_are_found():
    def candidate(text: str, score: float, finished: bool = True) -> Candidate:
        tokens = (text, "</s>") if finished else (text,)
        weights = torch.ones(len(tokens), 2, 3, 1)
        return Candidate(
            text, tokens, score, 2 * score, weights, weights.new_ones(len(tokens), 0, len(tokens)), finished
        )

    parts = [[candidate("a", -1.0), candidate("b", -1.5)], [candidate("c", -1.0), candidate("d", -3.0, False)]]
    best = join_candidates(parts, n_best=3)
    assert [(one.text, one.score, one.log_probability) for one in best] == [
        ("a c", -2.0, -4.0),
        ("b c", -2.5, -5.0),
        ("a d", -4.0, -8.0),
    ]
    assert best[0].tokens == ("a", "c", "</s>")
    assert best[0].weights[:, 0, 0].tolist() == [[1, 0], [0, 1], [0, 1]]
    assert best[0].self_weights.shape == (3, 0, 3)
    assert [one.finished for one in best] == [True, True, False]
