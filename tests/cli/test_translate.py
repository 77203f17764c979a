import re

import numpy as np
import pytest

from regard.translation import translator as translator_module
from regard.translation.run_folder import ENGLISH_FRENCH

PNG = b"\x89PNG\r\n\x1a\n"


def test_lines_in_give_lines_out(regard, run):
    result = regard("translate", "--checkpoint", run, input="1 2 3\n\n4\r\n5 5")
    assert result.exit_code == 0
    assert result.stdout == "eins zwei drei\n\nvier\nfünf fünf\n"
    assert result.stderr == ""


def test_sentences_can_be_arguments(regard, run):
    assert regard("translate", "--checkpoint", run, "7 8").stdout == "sieben acht\n"
    several = regard("translate", "--checkpoint", run, "7 8", "1", "5 5", input="not read")
    assert (several.stdout, several.stderr) == ("sieben acht\neins\nfünf fünf\n", "")


@pytest.mark.parametrize(("options", "sizes"), [([], [100]), (["--batch-size", 30], [30, 30, 30, 10])])
def test_a_batch_is_by_tokens_or_so_many_sentences(regard, run, monkeypatch, options, sizes):
    searched, search = [], translator_module.beam_search

    def counted(model, source, *others, **told):
        searched.append(len(source))
        return search(model, source, *others, **told)

    monkeypatch.setattr(translator_module, "beam_search", counted)
    lines = regard("translate", "--checkpoint", run, *options, input="1 2\n" * 100)
    assert lines.stdout == "eins zwei\n" * 100
    assert searched == sizes


def test_a_batch_of_no_sentence_is_refused(regard, run):
    result = regard("translate", "--checkpoint", run, "--batch-size", 0, "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--batch-size': Input should be greater than or equal to 1" in result.stderr


@pytest.mark.parametrize("empty", ["", "  ", "\t\n"])
def test_an_empty_sentence_is_refused(regard, run, empty):
    result = regard("translate", "--checkpoint", run, "1", empty)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("regard: sentence 2 of 2 is empty; give text to translate, or give no sentence")


def test_without_a_checkpoint_it_is_english_to_french_and_says_so_once(regard):
    result = regard("translate", "I am very tired.", "Thank you.")
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert "fatigué" in first
    assert "erci" in second
    assert result.stderr == (
        "English to French, by the model that regard comes with, for non-commercial use; --checkpoint names another\n"
    )
    lines = regard("translate", input="I am very tired.\n\nThank you.\n")
    assert lines.stdout == f"{first}\n\n{second}\n"
    assert lines.stderr == result.stderr


def test_the_model_of_the_package_has_one_set_of_weights(regard):
    result = regard("translate", "--which", "last", "Hello.")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "english_french_longer has no last.safetensors; choose 'best', which it has" in result.stderr


def test_its_attention_is_kept_too(regard, tmp_path):
    file = tmp_path / "look.npz"
    assert regard("translate", "--attention", file, "I am very tired.").exit_code == 0
    with np.load(file) as arrays:
        assert arrays["1.weights"].shape == (len(arrays["1.target"]), 3, 6, len(arrays["1.source"]))


@pytest.mark.parametrize("options", [[], ["--attention", "look.npz"]])
@pytest.mark.parametrize("name", ["--layer", "--head"])
def test_what_chooses_a_picture_needs_one(regard, run, options, name):
    result = regard("translate", "--checkpoint", run, name, 0, *options, "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{name} chooses what is drawn, and no picture was asked for: add --attention FILE.png" in result.stderr


def test_no_lines_give_no_lines(regard, run):
    result = regard("translate", "--checkpoint", run, input="")
    assert (result.exit_code, result.stdout) == (0, "")


def test_who_types_a_line_gets_an_answer_before_the_next_in_any_locale_until_ctrl_c(shell, run):
    typing = shell("translate", "--checkpoint", run, "--beam", 1, PYTHONIOENCODING="ascii")
    for line, answer in (("1", "eins"), ("", ""), ("2 5", "zwei fünf")):
        typing.say(f"{line}\n".encode())
        assert typing.hear() == f"{answer}\n".encode()
    typing.interrupt()
    code, stdout, stderr = typing.end()
    assert (code, stdout) == (130, b"")
    assert b"Traceback" not in stderr


def test_the_n_best_are_printed_with_line_and_score(regard, run):
    result = regard("translate", "--checkpoint", run, "--n-best", 2, "--beam", 4, input="1 2\n\n3\n")
    rows = [row.split(" ||| ") for row in result.stdout.splitlines()]
    assert [number for number, _, _ in rows] == ["0", "0", "2", "2"]
    assert [text for _, text, _ in rows[::2]] == ["eins zwei", "drei"]
    assert rows[0][1] != rows[1][1]
    assert all(float(first[2]) > float(second[2]) for first, second in (rows[:2], rows[2:]))


def test_the_beam_and_the_length_penalty_are_used(regard, run):
    def scores(*options):
        result = regard("translate", "--checkpoint", run, "--n-best", 1, *options, "1 2 3 4")
        return float(result.stdout.split(" ||| ")[2])

    assert scores("--length-penalty", 0) == pytest.approx(scores("--length-penalty", 1) * 10 / 6, rel=1e-3)
    too_many = regard("translate", "--checkpoint", run, "--n-best", 5, "--beam", 2, "1")
    assert too_many.exit_code == 2
    assert "search.n_best 5 needs a search.beam of at least as many; it is 2" in too_many.stderr


def test_unknown_words_are_translated_with_a_warning_on_stderr(regard, run):
    result = regard("translate", "--checkpoint", run, input="1\nzehn elf\n")
    assert result.exit_code == 0
    assert result.stdout.startswith("eins\n")
    assert len(result.stdout.splitlines()) == 2
    assert "line 2: the source vocabulary knows nothing of 'zehn elf'" in result.stderr


def test_what_a_model_does_not_know_is_told_once_a_line(regard):
    lines = ["I am very tired ❤️😊❤️.", "Привет", "I am very tired.", "I am (very) tired.", "I am Ж.", "😊"]
    plain = regard("translate", "--checkpoint", ENGLISH_FRENCH, "I am very tired.").stdout
    result = regard("translate", "--checkpoint", ENGLISH_FRENCH, input="\n".join(lines))
    assert result.exit_code == 0
    translated = result.stdout.splitlines(keepends=True)
    bare = [line.translate(dict.fromkeys(map(ord, "()"))).strip() for line in translated]
    assert bare[2:4] == [plain.strip()] * 2
    assert translated[0] == plain.replace(".", " ❤️😊❤️.")  # before the full stop, as in the source
    assert translated[5] == "😊\n"
    assert result.stderr.splitlines() == [
        "line 1: the source vocabulary does not know '❤', '😊', which it keeps as it is",
        "line 2: the source vocabulary knows nothing of 'Привет'; the translation is a guess",
        "line 2: it seems to be Russian, and the model reads English: the translation is a guess",
        "line 4: the source vocabulary does not know '(', ')', which it keeps as it is",
        "line 5: the source vocabulary does not know 'Ж'; what the translation says there is a guess",
        "line 6: the source vocabulary does not know '😊', which it keeps as it is",
    ]


def test_a_line_longer_than_any_that_was_trained_on_is_told(regard, run):
    long = "I am very tired and I have to go home now. " * 3
    result = regard("translate", "--checkpoint", ENGLISH_FRENCH, "--beam", 1, "I am very tired.", long)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "line 2: it has 36 tokens, more than are translated at once, and is translated in 3 parts, each by itself; "
        "give one sentence a line"
    ]
    alone = regard(
        "translate", "--checkpoint", ENGLISH_FRENCH, "--beam", 1, "I am very tired and I have to go home now."
    ).stdout.strip()
    assert result.stdout.splitlines()[1] == " ".join([alone] * 3)
    result = regard("translate", "--checkpoint", ENGLISH_FRENCH, "--beam", 1, "--split-above", 0, long)
    assert "line 1: it has 36 tokens, and the model was trained on sentences of 17 at most" in result.stderr
    result = regard("translate", "--checkpoint", run, "--beam", 1, input="1\n" + "1 " * 5)
    assert "line 2: it has 5 tokens, and the model was trained on sentences of 4 at most" in result.stderr
    assert "line 1" not in result.stderr


def test_what_is_not_utf_8_ends_it_with_the_line(regard, run):
    result = regard("translate", "--checkpoint", run, input=b"1\n2\n\xff\n")
    assert result.exit_code == 2
    assert result.stdout == "eins\nzwei\n"
    assert result.stderr.startswith("regard: standard input, line 3: byte 0xff at position 1 is not UTF-8")


def test_what_is_not_utf_8_can_be_replaced_or_left_out(regard, run):
    text = b"1\n2 \xff3\n\xff\n4\n"
    skipped = regard("translate", "--checkpoint", run, "--errors", "skip", input=text)
    assert (skipped.exit_code, skipped.stdout) == (0, "eins\n\n\nvier\n")
    assert skipped.stderr.splitlines()[0] == (
        "standard input, line 2: byte 0xff at position 3 is not UTF-8 (invalid start byte); the line is left out, and "
        "its translation is empty"
    )
    replaced = regard("translate", "--checkpoint", run, "--errors", "replace", input=text)
    assert replaced.exit_code == 0
    assert len(replaced.stdout.splitlines()) == 4
    assert replaced.stdout.splitlines()[3] == "vier"
    assert "line 2: byte 0xff at position 3 is not UTF-8 (invalid start byte); replaced by \ufffd" in replaced.stderr


def test_attention_is_drawn_for_each_line(regard, run, tmp_path):
    picture = tmp_path / "look.png"
    result = regard("translate", "--checkpoint", run, "--attention", picture, input="1 2\n\n3 4\n")
    assert result.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["look-3.png", "look.png"]
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())


def test_attention_is_kept_as_arrays(regard, run, tmp_path):
    file = tmp_path / "look.npz"
    assert regard("translate", "--checkpoint", run, "--attention", file, input="1 2\n\n3\n").exit_code == 0
    with np.load(file) as arrays:
        assert sorted(arrays) == ["1.source", "1.target", "1.weights", "3.source", "3.target", "3.weights"]
        assert arrays["1.source"].tolist() == ["1", "2"]
        assert arrays["1.target"].tolist() == ["eins", "zwei", "</s>"]
        assert arrays["1.weights"].shape == (3, 2)
        np.testing.assert_allclose(arrays["1.weights"].sum(axis=1), 1, rtol=1e-5)


def test_attention_of_another_kind_is_refused_before_anything_is_done(regard, tmp_path):
    result = regard("translate", "--checkpoint", tmp_path, "--attention", tmp_path / "look.jpg", "1")
    assert result.exit_code == 2
    assert "look.jpg: the name needs to end in .png, for pictures, or in .npz" in result.stderr


def test_attention_in_a_folder_that_is_not_there_is_an_error(regard, run, tmp_path):
    file = tmp_path / "nowhere" / "look.npz"
    result = regard("translate", "--checkpoint", run, "--attention", file, "1")
    assert result.exit_code == 2
    assert "nowhere does not exist" in result.stderr


def test_nothing_of_the_arrays_is_left_when_a_line_is_bad(regard, run, tmp_path):
    result = regard("translate", "--checkpoint", run, "--attention", tmp_path / "look.npz", input=b"1\n\xff\n")
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_terms_and_forced_words_are_in_the_translation(regard, run, tmp_path):
    (tmp_path / "terms.tsv").write_text("1\tzwei\n2 3\tneun\n", encoding="utf-8")
    options = "translate", "--checkpoint", run, "--terms", tmp_path / "terms.tsv"
    result = regard(*options, input="1 4\n2 3 5\n4\n")
    assert result.exit_code == 0, result.stderr
    first, second, third = (line.split() for line in result.stdout.splitlines())
    assert "zwei" in first
    assert "neun" in second
    assert third == ["vier"]
    forced = regard(*options, "--force", "acht", "--force", "null", "4")
    assert {"acht", "null"} <= set(forced.stdout.split())


def test_a_term_that_cannot_be_written_ends_it_at_once(regard, run, tmp_path):
    (tmp_path / "terms.tsv").write_text("1\telf\n", encoding="utf-8")
    result = regard("translate", "--checkpoint", run, "--terms", tmp_path / "terms.tsv", "4")
    assert result.exit_code == 2
    assert "'elf' cannot be written with the target vocabulary: it lacks 'elf'; force other words" in result.stderr
    (tmp_path / "terms.tsv").write_text("1 elf\n", encoding="utf-8")
    result = regard("translate", "--checkpoint", run, "--terms", tmp_path / "terms.tsv", "4")
    assert result.exit_code == 2
    assert re.search(r"terms.tsv, line 1: '1 elf' is no term; it needs a phrase of the source, one tab", result.stderr)
    assert regard("translate", "--terms", tmp_path / "none", "4").exit_code == 2
    empty = regard("translate", "--force", "", "4")
    assert empty.exit_code == 2
    assert "words that are forced are empty" in empty.stderr


def test_weights_in_bytes_say_the_same_and_are_for_transformers(regard, run):
    plain, rounded = (regard("translate", *option, "I am very tired.") for option in ([], ["--int8"]))
    assert (rounded.exit_code, rounded.stdout) == (0, plain.stdout)
    refused = regard("translate", "--checkpoint", run, "--int8", "1")
    assert refused.exit_code == 2
    assert "a RecurrentTranslator, and only a Transformer's decoder has steps in int8" in refused.stderr
