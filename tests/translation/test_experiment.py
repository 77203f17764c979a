from pathlib import Path
from typing import Any

import pytest

from regard.errors import ConfigurationError
from regard.language.language_experiment import LanguageExperiment, load_experiment
from regard.models import LanguageModel
from regard.translation.build_model import build_model
from regard.translation.config_errors import OTHER_NAMES, _places
from regard.translation.experiment import Experiment
from regard.translation.preparation import Preparation
from regard.translation.settings import (
    HiddenScoreSettings,
    LearnedPositionSettings,
    LocalWindowSettings,
    LuongSettings,
    PlainScoreSettings,
    PlateauDecay,
    RecurrentSettings,
    TextTable,
    TransformerSettings,
)

MINIMAL = """
name: toy
data:
  train: {source: train.en, target: train.de}
"""


ALIGNED = "name: toy\ndata: {train: {source: a, target: b}, alignments: a.align}\n"


def load(folder: Path, text: str, *overrides: str) -> Experiment:
    path = folder / "toy.yaml"
    path.write_text(text, encoding="utf-8")
    return Experiment.load(path, overrides)


def complaint(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(str(folder), "FOLDER")


def decoder_of(experiment: Experiment) -> Any:
    assert isinstance(experiment.model, RecurrentSettings)
    return experiment.model.decoder


def test_name_and_training_text_are_enough(tmp_path: Path):
    experiment = load(tmp_path, MINIMAL)
    assert experiment.seed == 1
    assert experiment.data.folder == Path()
    assert experiment.data.validation is None
    assert decoder_of(experiment).kind == "bahdanau"
    assert decoder_of(experiment).score.kind == "additive"
    assert experiment.training.validate_every == 1.0
    assert experiment.search.beam == 5


def test_options_with_parameters_are_mappings_and_their_plain_names_are_shorthand(tmp_path: Path):
    text = (
        MINIMAL + "model: {decoder: {kind: luong, score: concat, window: {kind: local-p, radius: 3}, readout: linear}}"
    )
    decoder = decoder_of(load(tmp_path, text))
    window = LocalWindowSettings(kind="local-p", radius=3)
    assert decoder == LuongSettings(score=HiddenScoreSettings(kind="concat"), window=window, readout="linear")
    assert decoder_of(load(tmp_path, MINIMAL + "model: {decoder: luong}")) == LuongSettings()
    assert load(tmp_path, MINIMAL + "training: {learning_rate: 1e-3}").training.learning_rate == 0.001


def test_text_can_be_two_columns_of_a_table(tmp_path: Path):
    experiment = load(tmp_path, "name: toy\ndata: {train: {tsv: pairs.tsv.gz, source_column: 1, target_column: 0}}")
    assert experiment.data.train == TextTable(tsv=Path("pairs.tsv.gz"), source_column=1, target_column=0)


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("modle: {}", "modle: unknown key; did you mean 'model'?"),
        ("7: 1", "7: unknown key; Known: 'data', 'model'"),
        ("model: {cel: gru}", "model.cel: unknown key; did you mean 'cell'?"),
        ("training: {decay: {kind: plateau, factr: 0.5}}", "training.decay.factr: unknown key; did you mean 'factor'?"),
        ("vocabulary: {lower_case: true}", "vocabulary.lower_case: unknown key; did you mean 'lowercase'?"),
        ("vocabulary: {source: {sice: 3}, target: {}}", "vocabulary.source.sice: unknown key; did you mean 'size'?"),
        ("training: {beam: 3}", "training.beam: unknown key; it belongs elsewhere: write search.beam"),
        ("learning_rate: 1", "learning_rate: unknown key; it belongs elsewhere: write training.learning_rate"),
        ("model: tranformer", "model: there is no kind 'tranformer'; did you mean 'transformer'?"),
        ("model: {kind: transformer, heads: 4}", "model.heads: unknown key; did you mean 'num_heads'?"),
        ("model: {kind: transformer, cell: gru}", "model.cell: unknown key; only the kind 'recurrent' has it"),
        ("model: {kind: transformer, pointer: true}", "model.pointer: unknown key; only the kind 'recurrent' has it"),
        (
            "model: {kind: transformer, coverage: sum}",
            "model.coverage: unknown key; it belongs elsewhere: write model.de",
        ),
        ("model: {kind: transformer, positions: rotery}", "model.positions: there is no kind 'rotery'; did you mean"),
        ("vocabulary: letters", "vocabulary: there is no kind 'letters'; Known: 'bpe', 'characters'"),
        ("vocabulary: {kind: word}", "vocabulary: there is no kind 'word'; did you mean 'words'?"),
        ("training: {lr: 1e-3}", "training.lr: unknown key; did you mean 'learning_rate'? Known: 'accelerator', "),
        ("training: {epochs: 3}", "training.epochs: unknown key; did you mean 'max_epochs'?"),
        ("lr: 1e-3", "lr: unknown key; it belongs elsewhere: write training.learning_rate"),
        ("model: {lr: 1e-3}", "model.lr: unknown key; it belongs elsewhere: write training.learning_rate"),
        ("model: {kind: transformer, d_model: 8}", "model.d_model: unknown key; did you mean 'dim'?"),
        (
            "model: {kind: bahdanau}",
            "model: there is no kind 'bahdanau'; it belongs elsewhere: write model.decoder.kind. "
            "Known: 'recurrent', 'transformer'",
        ),
        (
            "model: {decoder: dot}",
            "model.decoder: there is no kind 'dot'; it belongs elsewhere: write model.decoder.score",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, addition: str, message: str):
    assert complaint(tmp_path, MINIMAL + addition).startswith(f"FOLDER/toy.yaml: {message}")


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("bahdanu", "model.decoder: there is no kind 'bahdanu'; did you mean 'bahdanau'? Known: 'bahdanau', 'luong'"),
        (
            "{kind: bahdanau, score: additve}",
            "model.decoder.score: there is no kind 'additve'; did you mean 'additive'?",
        ),
        ("{kind: bahdanau, scor: dot}", "model.decoder.scor: unknown key; did you mean 'score'?"),
        ("{kind: luong, window: {kind: local-m, radus: 3}}", "model.decoder.window.radus: unknown key; did you mean"),
        (
            "{kind: luong, score: {kind: concat, hiden_dim: 3}}",
            "model.decoder.score.hiden_dim: unknown key; did you mean",
        ),
        ("{kind: luong, score: {kind: dot, scale: 3}}", "model.decoder.score.scale: unknown key; Known: 'kind'"),
        (
            "{kind: luong, radius: 3}",
            "model.decoder.radius: unknown key; it belongs elsewhere: write model.decoder.window",
        ),
        ("{kind: bahdanau, window: local-m}", "model.decoder.window: unknown key; only the kind 'luong' has it"),
        ("{kind: bahdanau, coverage: summ}", "model.decoder.coverage: there is no kind 'summ'; did you mean 'sum'?"),
        (
            "{kind: bahdanau, coverage: {kind: sum, most: 3}}",
            "model.decoder.coverage.most: unknown key; only the kind 'fertility' has it",
        ),
    ],
)
def test_keys_are_known_by_the_kind_they_stand_under(tmp_path: Path, decoder: str, message: str):
    text = MINIMAL + f"model: {{decoder: {decoder}}}"
    assert complaint(tmp_path, text).startswith(f"FOLDER/toy.yaml: {message}")


@pytest.mark.parametrize(
    "train", ["{columns: [0, 1]}", "{tsv: pairs.tsv, columns: [0, 1]}", "{source: a, target: b, columns: [0, 1]}"]
)
def test_columns_of_a_table_have_their_own_keys(tmp_path: Path, train: str):
    message = complaint(tmp_path, f"name: toy\ndata: {{train: {train}}}")
    assert message == (
        "FOLDER/toy.yaml: data.train.columns: unknown key; did you mean 'source_column' or 'target_column'? "
        "Known: 'source', 'source_column', 'target', 'target_column', 'tsv'"
    )


def test_every_other_name_is_that_of_a_key():
    known = {place[-1] for name in sum(OTHER_NAMES.values(), ()) for place in _places(name, Experiment)}
    assert known == set(sum(OTHER_NAMES.values(), ()))
    assert not any(list(_places(name, Experiment)) for name in OTHER_NAMES if name != "layers")


def test_all_unknown_keys_are_told_at_once(tmp_path: Path):
    lines = complaint(tmp_path, MINIMAL + "modle: {}\ntraining: {patiense: 3}").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["modle", "training.patiense"]


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("seed: -1", "seed: has -1, needs to be greater than or equal to 0"),
        ("seed: yes", "seed: has 'yes', needs to be a valid integer"),
        ("training: {max_epochs: true}", "training.max_epochs: has True, needs to be a number"),
        ("training: {learning_rate: fast}", "training.learning_rate: has 'fast', needs to be a valid number"),
        ("training: {learning_rate: .inf}", "training.learning_rate: has inf, needs to be a finite number"),
        ("training: {validate_every: 1.5}", "training.validate_every: has 1.5, needs to be a valid integer"),
        ("training: {devices: [0, x]}", "training.devices.1: has 'x', needs to be a valid integer"),
        ("model: {pointer: 3}", "model.pointer: has 3, needs to be a valid boolean"),
        ("model: {decoder: {kind: bahdanau, coverage: 3}}", "model.decoder.coverage: has 3, needs"),
        (
            "model: {decoder: {kind: bahdanau, coverage: {kind: fertility, most: 0}}}",
            "model.decoder.coverage.most: has 0, needs to be greater than 0",
        ),
        ("training: {coverage_loss: -1}", "training.coverage_loss: has -1, needs to be greater than or equal to 0"),
        ("training: {coverage_loss: true}", "training.coverage_loss: has True, needs to be a number"),
        ("training: {guided_alignment: 0.1}", "training.guided_alignment: has 0.1, needs to be a valid dictionary"),
        ("training: {guided_alignment: {weight: 0}}", "training.guided_alignment.weight: has 0, needs to be greater"),
        ("training: {guided_alignment: {head: -1}}", "training.guided_alignment.head: has -1, needs to be greater"),
        ("training: {guided_alignment: {layer: last}}", "training.guided_alignment.layer: has 'last', needs to be a"),
        ("  alignments: {tsv: a}", "data.alignments: has {'tsv': 'a'}, needs to be a path"),
        ("training: {label_smoothing: 1}", "training.label_smoothing: has 1, needs to be less than 1"),
        ("training: 3", "training: has 3, needs to be a valid dictionary"),
        ("model: {cell: rnn}", "model.cell: has 'rnn', needs to be 'gru' or 'lstm'"),
        ("model: {decoder: {input_feeding: true}}", "model.decoder: has {'input_feeding': True}, needs the key 'kind'"),
        ("model: {decoder: 3}", "model.decoder: has 3, needs"),
        ("model: 3", "model: has 3, needs"),
        ("model: {num_heads: 4}", "model.num_heads: has 4, which only another kind has: write the 'kind' beside it"),
        ("model: {kind: transformer, norm: both}", "model.norm: has 'both', needs to be 'post' or 'pre'"),
        ("model: {kind: transformer, positions: {kind: learned, length: 0}}", "model.positions.length: has 0, needs"),
        ("training: {betas: [0.9]}", "training.betas.1: is missing"),
        ("training: {betas: [0.9, 1.0]}", "training.betas.1: has 1.0, needs to be less than 1"),
        ("  split: {test: -1}", "data.split.test: has -1, needs to be greater than or equal to 0"),
        ("  casual_copies: 1.0", "data.casual_copies: has 1.0, needs to be less than 1"),
        ("training: {max_updates: 0}", "training.max_updates: has 0, needs to be greater than or equal to 1"),
        ("vocabulary: {target: {kind: words}}", "vocabulary.source: is missing"),
    ],
)
def test_a_mistyped_value_is_named_with_what_it_needs(tmp_path: Path, addition: str, message: str):
    assert complaint(tmp_path, MINIMAL + addition).startswith(f"FOLDER/toy.yaml: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: {source: a, target: b}}", "name: is missing"),
        ("name: toy", "data: is missing"),
        ("name: toy\ndata: {train: {source: a}}", "data.train.target: is missing"),
        ("name: toy\ndata: {train: {tsv: a, target_column: 0}}",
         "data.train: source_column and target_column are both 0; they need to differ"),
        ("name: toy\ndata: {train: {tsv: a}, split: {}}",
         "data.split: holds nothing out; set data.split.validation or data.split.test to a number of pairs"),
        ("name: toy\ndata: {train: {tsv: a}, test: {tsv: b}, split: {test: 5}}",
         "data: data.test and data.split.test both say what the test text is; leave one out"),
        ("name: toy\ndata: {train: {tsv: a}, extra_times: 3}",
         "data: data.extra_times repeats the pairs of data.extra, and there are none: name their file"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(tmp_path: Path, text: str, message: str):
    assert complaint(tmp_path, text) == f"FOLDER/toy.yaml: {message}"


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("model: {decoder: {kind: luong, score: location}}", "set model.max_source_length"),
        ("training: {patience: 3}", "training.patience counts validations and needs text for them: set data"),
        ("training: {decay: plateau}", "training.decay plateau waits for validations and needs text for them"),
        ("training: {precision: 16-mixed, accelerator: cpu}", "training.precision 16-mixed does not exist on the"),
        ("vocabulary: {source: {shared: true}, target: {}}", "write vocabulary.shared, without vocabulary.source and"),
        ("search: {beam: 2, n_best: 3}", "search.n_best 3 needs a search.beam of at least as many; it is 2"),
        ("model: {decoder: {kind: luong, coverage: sum}}",
         "model.decoder.coverage enters the hidden layer of a score, and 'general' has none: set model.decoder.score"),
        ("model: {pointer: true}", "model.pointer says source tokens as words of the target and needs a vocabulary of"),
        ("model: {pointer: true}\nvocabulary: {source: {}, target: {}}", "set vocabulary.shared"),
        ("model: transformer\ntraining: {coverage_loss: 1.0}",
         "training.coverage_loss counts the weights of one attention to the source, and a Transformer has one"),
        ("training: {guided_alignment: {}}", "training.guided_alignment learns links of words and needs a file"),
        ("training: {guided_alignment: {head: 1}}\n" + ALIGNED, "one attention to the source: leave layer and head"),
        ("training: {guided_alignment: {layer: 0}}\n" + ALIGNED, "one attention to the source: leave layer and head"),
        ("model: transformer\ntraining: {guided_alignment: {layer: 6}}\n" + ALIGNED,
         "training.guided_alignment.layer is 6, and the decoder has 6 layers, 0 to 5"),
        ("model: {kind: transformer, num_heads: 2}\ntraining: {guided_alignment: {head: 2}}\n" + ALIGNED,
         "training.guided_alignment.head is 2, and the decoder has 2 heads, 0 to 1"),
        (ALIGNED, "data.alignments is read by training.guided_alignment: set that, or leave the file out"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused(tmp_path: Path, addition: str, message: str):
    text = addition if ALIGNED in addition else MINIMAL + addition
    said = complaint(tmp_path, text)
    assert message in said
    assert "has {" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: toy\nseed: 1\nname: other", "line 3, column 1: the key 'name' is there twice, first in line 1"),
        ("name: toy\ndata: {train: 1, train: 2}", "line 2, column 18: the key 'train' is there twice, first in line 2"),
        ("name: [toy", "line 1, column 11: expected ',' or ']'"),
        ("- name", "holds list, not a mapping"),
        ("", "is empty; it needs keys such as 'name' and 'data'"),
        ("name: \x07", "is not YAML"),
        ("name: !!python/object/apply:os.getcwd []", "line 1, column 7: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_experiment_is_told(tmp_path: Path, text: str, message: str):
    assert complaint(tmp_path, text).startswith(f"FOLDER/toy.yaml: {message}")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"none\.yaml: cannot be read \(No such file or directory\)"):
        Experiment.load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"latin\.yaml: is not UTF-8 text \(byte 6\)"):
        Experiment.load(tmp_path / "latin.yaml")


def test_the_model_is_chosen_by_its_name(tmp_path: Path):
    assert load(tmp_path, MINIMAL + "model: transformer").model == TransformerSettings()
    assert load(tmp_path, MINIMAL + "model: recurrent").model == RecurrentSettings()
    text = MINIMAL + "model: {kind: transformer, positions: learned, norm: pre}\ntraining: {betas: [0.9, 0.98]}"
    experiment = load(tmp_path, text, "model.dim=64")
    assert experiment.model == TransformerSettings(dim=64, positions=LearnedPositionSettings(), norm="pre")
    assert experiment.training.betas == (0.9, 0.98)
    experiment.save(tmp_path / "saved.yaml")
    assert Experiment.load(tmp_path / "saved.yaml") == experiment


RECIPES = Path(__file__).parents[2] / "recipes"


TEXTS = sorted(RECIPES.glob("*-text.yaml"))


@pytest.mark.parametrize("recipe", TEXTS, ids=lambda path: path.stem)
def test_every_recipe_of_a_text_is_a_preparation_of_its_name(recipe: Path):
    assert Preparation.load(recipe).name == recipe.stem


@pytest.mark.parametrize("recipe", sorted({*RECIPES.glob("*.yaml")} - {*TEXTS}), ids=lambda path: path.stem)
def test_every_recipe_is_an_experiment_of_its_name(recipe: Path):
    experiment = load_experiment(recipe)
    assert experiment.name == recipe.stem
    if isinstance(experiment, LanguageExperiment):
        LanguageModel(experiment.model.config())
    else:
        build_model(experiment.model, 50, 50)


def test_a_split_gives_the_text_to_validate_on(tmp_path: Path):
    load(tmp_path, MINIMAL + "  split: {validation: 9}\ntraining: {patience: 3, decay: plateau}")
    said = complaint(tmp_path, MINIMAL + "  split: {test: 9}\ntraining: {patience: 3}")
    assert said.endswith("needs text for them: set data.validation or data.split")


def test_overrides_are_put_in_before_anything_is_checked(tmp_path: Path):
    experiment = load(
        tmp_path,
        MINIMAL + "model: {decoder: {kind: bahdanau, score: concat}}",
        "data.folder=/text",
        "training.learning_rate=1e-4",
        "training.decay={kind: inverse-sqrt}",
        "model.decoder.score.hidden_dim=7",
        "data.source_language=no",
        "data.validation={tsv: a}",
        "search.beam=1",
    )
    assert experiment.data.folder == Path("/text")
    assert experiment.training.learning_rate == 1e-4
    assert experiment.training.decay.kind == "inverse-sqrt"
    assert decoder_of(experiment).score == HiddenScoreSettings(kind="concat", hidden_dim=7)
    assert experiment.data.source_language == "no"
    assert experiment.data.validation == TextTable(tsv=Path("a"))
    assert decoder_of(load(tmp_path, MINIMAL, "model.decoder=luong")) == LuongSettings()
    assert load(tmp_path, MINIMAL, "data.validation=a.tsv").data.validation == TextTable(tsv=Path("a.tsv"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_epochs", "--set 'training.max_epochs' is not of the form key=value"),
        (".max_epochs=3", "--set '.max_epochs=3' is not of the form key=value"),
        ("name=[", "--set 'name=[': the value: line 1"),
        ("seed.x=3", "--set 'seed.x=3': seed is 5 and holds no keys"),
        ("trainin.max_epochs=3", "FOLDER/toy.yaml: trainin: unknown key; did you mean 'training'?"),
        ("training.max_epoch=3", "FOLDER/toy.yaml: training.max_epoch: unknown key; did you mean 'max_epochs'?"),
    ],
)
def test_a_bad_override_is_told(tmp_path: Path, override: str, message: str):
    assert complaint(tmp_path, MINIMAL + "seed: 5", override).startswith(message)


def test_an_experiment_survives_its_yaml(tmp_path: Path):
    text = MINIMAL + (
        "  folder: some/where\n  validation: {tsv: v.tsv, source_column: 2}\n  source_language: no\n"
        "vocabulary: {source: {kind: characters}, target: {kind: bpe, size: 500}}\n"
        "model: {max_source_length: 9, decoder: {kind: luong, score: location, window: local-m}}\n"
        "training: {decay: {kind: plateau, factor: 0.3}, clip_norm: null, validate_every: 1, devices: [0, 1]}\n"
    )
    experiment = load(tmp_path, text)
    assert experiment.training.decay == PlateauDecay(factor=0.3)
    assert decoder_of(experiment).score == PlainScoreSettings(kind="location")
    experiment.save(tmp_path / "saved.yaml")
    again = Experiment.load(tmp_path / "saved.yaml")
    assert again == experiment
    assert isinstance(again.training.validate_every, int)
    assert again.dump() == experiment.dump()


def test_differences_name_the_keys(tmp_path: Path):
    one = load(tmp_path, MINIMAL)
    other = load(tmp_path, MINIMAL, "model.decoder=luong", "training.max_epochs=7")
    assert one.differences(one) == []
    assert {"model.decoder.kind", "model.decoder.readout", "training.max_epochs"} < set(one.differences(other))
    assert "model.cell" not in one.differences(other)


BILLION = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))


@pytest.mark.parametrize("key", ["name", "seed", "data", "model", "training", "search", "vocabulary", "unheard_of"])
def test_a_small_file_that_aliases_make_large_is_refused_at_once(tmp_path: Path, key: str):
    message = complaint(tmp_path, f"a0: &a0 [x, y]\n{BILLION}\n{key}: *a9\n")
    assert "with its aliases written out, this has more than 100,000 values" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: " + "[" * 5000, "collections are nested deeper than 100 times"),
        ("name: " + "{a: " * 5000, "collections are nested deeper than 100 times"),
        ("a: &a [*a]", "line 1, column 8: the alias stands within the value that it names"),
        ("seed: " + "9" * 100_000, "line 1, column 7: '99999999999999999999'... is not a number that can be used"),
        ("seed: !!float x", "a value does not fit its tag"),
        ("seed: !!timestamp x", "a value does not fit its tag"),
    ],
)
def test_a_hostile_file_is_refused_in_plain_words(tmp_path: Path, text: str, message: str):
    assert message in complaint(tmp_path, text)
