import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from regard.errors import CheckpointError, ConfigurationError, CorpusError, DeviceError, VocabularyError
from regard.translation.build_model import build_model
from regard.translation.checkpoint import save_weights
from regard.translation.experiment import Experiment
from regard.translation.settings import SearchSettings
from regard.translation.translator import Translator
from regard.translation.vocabulary import END, Vocabulary, VocabularySettings

ENGLISH = ["a dog runs", "the dog sees a cat", "a cat sleeps in the snow", "no dogs"]
GERMAN = ["ein Hund rennt", "der Hund sieht eine Katze", "eine Katze schläft im Schnee", "keine Hunde"]


def vocabulary(lines: list[str], kind: str = "words") -> Vocabulary:
    return Vocabulary.train(lines, VocabularySettings(kind=kind))  # pyright: ignore[reportArgumentType]


def experiment(**model) -> Experiment:
    files = {"source": "train.en", "target": "train.de"}
    small = {"embedding_dim": 6, "hidden_dim": 8, "dropout": 0.5}
    return Experiment.from_mapping({"name": "toy", "data": {"train": files}, "model": small | model})


def save_run(folder: Path, settings: Experiment) -> None:
    """A run folder as training leaves it, but untrained."""
    torch.manual_seed(5)
    source, target = vocabulary(ENGLISH), vocabulary(GERMAN)
    folder.mkdir(exist_ok=True)
    settings.save(folder / "experiment.yaml")
    source.save(folder / "source.vocabulary.json")
    target.save(folder / "target.vocabulary.json")
    model = build_model(settings.model, len(source), len(target))
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # large: a model that is sure of something else for each sentence
    save_weights(model, folder / "best.safetensors", {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_run(tmp_path / "run", experiment())
    return tmp_path / "run"


@dataclass(frozen=True)
class Rows:
    values: Tensor

    def reorder(self, rows: Tensor) -> "Rows":
        return Rows(self.values[rows])


@dataclass(frozen=True)
class Step:
    logits: Tensor
    state: Rows
    weights: Tensor
    self_weights: Tensor | None = None


class Reverser(nn.Module):
    """Says the source backwards, surely, and looks with 0.9 where it reads and with the rest at the first token."""

    def __init__(self, size: int, max_source_length: int | None = None) -> None:
        super().__init__()
        self.size, self.max_source_length = size, max_source_length
        self.anchor = nn.Parameter(torch.zeros(()))
        self.batches: list[list[int]] = []

    def encode(self, source: Tensor, source_lengths: Tensor) -> Rows:
        self.batches.append(source_lengths.tolist())
        return Rows(torch.cat([source_lengths[:, None], source], dim=1))

    def start(self, memory: Rows) -> Rows:
        return Rows(torch.zeros(len(memory.values), dtype=torch.int64))

    def step(self, tokens: Tensor, state: Rows, memory: Rows) -> Step:
        lengths, source = memory.values[:, 0], memory.values[:, 1:]
        place = (lengths - 1 - state.values).clamp(min=0)
        said = source.gather(1, place[:, None])[:, 0].where(state.values < lengths, torch.tensor(END))
        logits = 20.0 * nn.functional.one_hot(said, self.size)
        weights = 0.9 * nn.functional.one_hot(place, source.shape[1])
        weights[:, 0] += 0.1
        return Step(logits, Rows(state.values + 1), weights)

    max_target_length = None
    observe_step = step

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        memory, state, rows = self.encode(source, source_lengths), Rows(torch.zeros(len(source), dtype=torch.int64)), []
        for tokens in target.T:
            step = self.step(tokens, state, memory)
            state = step.state
            rows.append(step.weights)
        return torch.stack(rows, dim=1)


def reverser(lines: list[str], kind: str = "words", max_source_length: int | None = None) -> Translator:
    known = vocabulary(lines, kind)
    return Translator(Reverser(len(known), max_source_length), known, known, SearchSettings(beam=2))


def test_a_run_is_loaded_and_translates_the_same_every_time(run):
    first, second = Translator.load(run), Translator.load(str(run))
    assert not first.model.training  # pyright: ignore[reportAttributeAccessIssue] (or dropout would change it)
    once = [translation.text for translation in first.translate(ENGLISH)]
    assert once == [translation.text for translation in second.translate(ENGLISH)]
    assert len(set(once)) > 1


def test_the_last_weights_can_be_chosen(run):
    last = Translator.load(run)
    nn.init.normal_(last.model.output.weight)  # pyright: ignore[reportAttributeAccessIssue]
    save_weights(last.model, run / "last.safetensors", {})  # pyright: ignore[reportArgumentType]
    texts = [Translator.load(run, which).translate(ENGLISH)[0].text for which in ("best", "last")]
    assert texts[0] != texts[1]


def test_weights_that_no_run_keeps_are_refused(run):
    with pytest.raises(
        ConfigurationError, match=r"which is 'bets', .*; did you mean 'best'\? Known: 'average', 'best', 'last'"
    ):
        Translator.load(run, "bets")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["experiment.yaml", "source.vocabulary.json", "target.vocabulary.json"])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    with pytest.raises(
        CheckpointError, match=f"run has no {name}; it needs to be the folder of a run of `regard train`"
    ):
        Translator.load(run)


def test_missing_weights_are_named_with_those_that_are_there(run):
    with pytest.raises(CheckpointError, match=r"has no last.safetensors; choose 'best', which it has"):
        Translator.load(run, "last")
    (run / "best.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no best.safetensors; the training has not saved any weights yet"):
        Translator.load(run)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere; it needs to be the folder of a run"):
        Translator.load(tmp_path / "nowhere")


def test_a_name_of_a_hub_is_not_downloaded_and_a_file_is_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder Helsinki-NLP/opus-mt-en-fr; .*nothing is downloaded"):
        Translator.load("Helsinki-NLP/opus-mt-en-fr")
    (tmp_path / "decoder.yml").write_text("models: []", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"decoder.yml is a file; it needs to be the folder of a run .*or Marian"):
        Translator.load(tmp_path / "decoder.yml")


def test_an_empty_folder_lacks_everything(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no experiment.yaml, source.vocabulary.json, .*, best.safetensors"):
        Translator.load(tmp_path)


def test_weights_of_another_model_say_what_differs(run):
    experiment(hidden_dim=16).save(run / "experiment.yaml")
    with pytest.raises(
        CheckpointError, match=r"best.safetensors is of another model .* the file has \[.*the model needs"
    ):
        Translator.load(run)


def test_truncated_weights_are_refused(run):
    weights = run / "best.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"best.safetensors is not a whole safetensors file"):
        Translator.load(run)


def test_damaged_text_files_are_refused(run):
    (run / "source.vocabulary.json").write_text("{", encoding="utf-8")
    with pytest.raises(VocabularyError, match=r"source.vocabulary.json is truncated"):
        Translator.load(run)
    (run / "experiment.yaml").write_text("nonsense: 1", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"nonsense: unknown key"):
        Translator.load(run)


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_named(run, device):
    with pytest.raises(DeviceError, match=rf"the device '{device}' cannot be used here: .*; cpu always can"):
        Translator.load(run, device=device)


def test_lines_come_back_in_order_and_are_computed_by_length():
    translator = reverser(ENGLISH)
    translations = translator.translate(
        ["a dog", "", "a cat sees the dog", "snow", "  ", "the snow sleeps"], batch_size=2
    )
    assert [translation.text for translation in translations] == [
        "dog a", "", "dog the sees cat a", "snow", "", "sleeps snow the",
    ]  # fmt: skip
    assert translator.model.batches == [[5, 3], [2, 1]]  # pyright: ignore[reportAttributeAccessIssue]


def test_without_a_number_short_lines_are_together_by_their_tokens_and_come_back_in_order():
    translator, draw = reverser(ENGLISH), random.Random(2)
    lines = [" ".join(draw.choices(ENGLISH[1].split(), k=draw.randint(1, 20))) for _ in range(300)]
    found = [translation.text for translation in translator.translate(lines)]
    assert found == [" ".join(reversed(line.split())) for line in lines]
    batches = translator.model.batches  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(map(len, batches)) == 300
    assert all(64 < len(lengths) == 2048 // max(lengths) for lengths in batches[:-1])


def test_a_translation_has_its_tokens_and_where_each_looked():
    [translation] = reverser(ENGLISH).translate(["a dog runs"])
    best = translation.candidates[0]
    assert translation.source == "a dog runs"
    assert translation.source_tokens == ("a", "dog", "runs")
    assert best.tokens == ("runs", "dog", "a", "</s>")
    assert best.weights.shape == (4, 3)
    assert best.weights.argmax(dim=1).tolist()[:3] == [2, 1, 0]
    assert best.finished
    assert best.score == pytest.approx(best.log_probability / ((5 + 4) / 6))
    assert translation.warnings == ()


def test_every_candidate_of_the_n_best_is_given(run):
    translator = Translator.load(run)
    many = translator.translate(ENGLISH, search=SearchSettings(beam=4, n_best=3, length_penalty=0.0))
    for translation in many:
        assert len(translation.candidates) == 3
        assert translation.text == translation.candidates[0].text
        assert [one.score for one in translation.candidates] == [one.log_probability for one in translation.candidates]
    assert all(len(one.candidates) == 1 for one in translator.translate(ENGLISH))


@pytest.mark.parametrize("batch_size", [1, 3, 100, None])
def test_the_batch_size_changes_nothing(run, batch_size):
    translator = Translator.load(run)
    expected = [translator.translate([line])[0] for line in ENGLISH]
    for one, other in zip(expected, translator.translate(ENGLISH, batch_size=batch_size), strict=True):
        assert other.text == one.text
        torch.testing.assert_close(other.candidates[0].weights, one.candidates[0].weights)


def test_an_empty_line_has_an_empty_translation():
    [translation] = reverser(ENGLISH).translate([" \t"])
    assert (translation.text, translation.candidates, translation.source_tokens) == ("", (), ())
    assert translation.warnings == ()
    assert reverser(ENGLISH).translate([]) == []


def test_a_line_of_unknown_words_is_translated_with_a_warning(run):
    known, unknown, partly = Translator.load(run).translate(["a dog", "zwei Esel", "a Esel"], first_line=7)
    assert unknown.candidates
    assert unknown.warnings[0] == (
        "line 8: the source vocabulary knows nothing of 'zwei Esel'; the translation is a guess"
    )
    assert not [warning for one in (known, partly) for warning in one.warnings if "knows nothing" in warning]


def test_a_translation_that_was_cut_says_so(run):
    translator = Translator.load(run)
    output = translator.model.output  # pyright: ignore[reportAttributeAccessIssue]
    output.bias.data[END] = -1e9
    [translation] = translator.translate(["a dog runs"], search=SearchSettings(beam=1, max_length_ratio=1.0))
    assert translation.warnings == ("line 1: the translation did not end within 13 tokens and was cut",)
    assert not translation.candidates[0].finished
    assert len(translation.candidates[0].tokens) == 13


def test_a_line_longer_than_the_model_allows_is_refused_by_number():
    translator = reverser(ENGLISH, max_source_length=4)
    assert translator.translate(["a cat sees the"])[0].text == "the sees cat a"
    with pytest.raises(CorpusError, match=r"line 12 has 5 tokens and this model allows 4; split it into shorter"):
        translator.translate(["a dog", "a cat sees the dog"], first_line=11)
    with pytest.raises(CorpusError, match=r"line 2 has 5 tokens and this model allows 4"):
        translator.align(["a dog", "a cat sees the dog"], ["dog a", "dog"])


def test_a_text_in_place_of_lines_is_refused():
    with pytest.raises(CorpusError, match=r"lines is one text, 'a dog'; it needs to be a list of lines"):
        reverser(ENGLISH).translate("a dog")


def test_the_heat_map_has_a_row_for_each_token():
    figure = reverser(ENGLISH).translate(["a dog runs"])[0].heatmap()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "dog", "runs"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["runs", "dog", "a", "</s>"]


def test_the_heat_map_of_a_candidate_that_is_not_there_is_refused(run):
    empty, full = Translator.load(run).translate(["", "a dog"])
    with pytest.raises(CorpusError, match=r"there is no candidate 0 to draw: '' has 0 candidates"):
        empty.heatmap()
    with pytest.raises(CorpusError, match=r"there is no candidate 1 to draw: 'a dog' has 1 candidates"):
        full.heatmap(1)


def test_words_are_linked_with_what_they_were_said_from():
    translator = reverser(["abc de f"], kind="characters")
    first, empty, second = translator.align(["abc de", "abc", "f abc"], ["ed cba", "", "cba f"])
    assert first.links == ((0, 1), (1, 0))
    assert first.weights.shape == (6, 6)
    assert torch.equal(first.weights.argmax(dim=1), torch.arange(6).flip(0))
    assert (empty.links, empty.weights.shape) == ((), (0, 3))
    assert second.links == ((0, 1), (1, 0))
    assert len(second.source_tokens) == len(second.target_tokens) == 5


def test_the_weights_of_an_alignment_are_those_of_the_search(run):
    translator = Translator.load(run)
    compared = 0
    for translation in translator.translate(ENGLISH, search=SearchSettings(beam=3)):
        if "<unk>" in translation.text:
            continue  # an unknown word cannot be said again from its text
        [pair] = translator.align([translation.source], [translation.text])
        torch.testing.assert_close(pair.weights, translation.candidates[0].weights[: len(pair.weights)])
        assert pair.target_tokens == translation.candidates[0].tokens[: len(pair.weights)]
        compared += len(pair.weights)
    assert compared > 10


def test_the_batch_does_not_show_in_an_alignment(run):
    translator = Translator.load(run)
    together = translator.align(ENGLISH, GERMAN)
    for pair, source, target in zip(together, ENGLISH, GERMAN, strict=True):
        [alone] = translator.align([source], [target])
        torch.testing.assert_close(pair.weights, alone.weights)
        torch.testing.assert_close(pair.weights.sum(dim=1), torch.ones(len(pair.weights)))


def test_sides_of_different_lengths_are_refused(run):
    with pytest.raises(CorpusError, match=r"there are 2 source lines and 1 target lines"):
        Translator.load(run).align(["a", "b"], ["c"])
