import json
import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest

from regard.comparison import ComparisonReport, compare
from regard.comparison.run_record import RunKey, RunRecord
from regard.errors import ConfigurationError, CorpusError

OPTIONS = {"vary": {"score": ["dot", "general"]}, "lengths": [4]}


def test_each_variant_has_a_row_with_all_measures(finished):
    _, report = finished
    heading, *rows = report.cells()
    assert [row[0] for row in rows] == ["dot", "general"]
    assert all(len(row) == len(heading) for row in rows)
    assert {"nats per token", "95 % interval", "against dot", "p", "seconds", "memory", "parameters"} <= set(heading)
    dot, general = report.results
    assert (dot.seeds, dot.p_value, dot.difference) == ([1, 2], None, None)
    assert general.parameters - dot.parameters == 8 * 8  # the matrix of the general score
    assert dot.interval[0] < dot.quality < dot.interval[1]
    assert 0 < general.p_value <= 1


def test_quality_by_length_covers_the_test_text(finished):
    _, report = finished
    one = report.results[0]
    assert report.length_names == ["to 4", "above 4"]
    assert min(one.by_length) <= one.quality <= max(one.by_length)


def test_classes_of_length_are_named_by_their_ends_and_a_class_of_one_length_by_that(recipe):
    report = ComparisonReport(recipe(lengths=[4, 5, 8]), [])
    assert report.length_names == ["to 4", "5", "6 to 8", "above 8"]


def test_cross_entropy_is_that_of_a_fresh_look_at_the_model(finished):
    import torch

    from regard.translation.batches import collate, encode
    from regard.translation.data_split import evaluation_text
    from regard.translation.training_loss import training_loss
    from regard.translation.translator import Translator

    folder, report = finished
    run = next((folder / "runs").glob("general-2-*.json"))
    translator: Any = Translator.load(run.with_suffix(""), "last")
    experiment = report.recipe.experiment
    from regard.translation.experiment import Experiment

    text = evaluation_text(Experiment.from_mapping(experiment).data)
    assert text is not None
    encoded = encode(text, translator.source_vocabulary, translator.target_vocabulary)
    batch = collate(encoded, torch.arange(len(encoded)).numpy())
    with torch.no_grad():
        _, nats = training_loss(translator.model, batch, 0.0)
    assert report.results[1].qualities[1] == pytest.approx(float(nats) / batch.target_tokens, rel=1e-5)


def test_the_files_hold_the_same_numbers(finished):
    folder, report = finished
    table, page = (folder / name for name in ("table.md", "page.html"))
    results = json.loads((folder / "results.json").read_text())
    assert results["variants"][1]["quality"] == report.results[1].quality
    for row in report.cells():
        assert f"| {' | '.join(row)} |" in table.read_text()
    text = page.read_text()
    assert "data:image/svg+xml;base64," in text
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", re.sub(r"base64,[^\"]*", "", text))
    assert (folder / "figure.svg").read_text().startswith("<?xml")


def test_a_finished_comparison_trains_nothing(finished, recipe):
    folder, before = finished
    lines = []
    report = compare(recipe(**OPTIONS), folder, progress=lines.append)
    assert lines == ["4 of 4 runs are there already"]
    assert str(report).splitlines()[:4] == str(before).splitlines()[:4]


def test_runs_of_other_settings_or_text_are_not_used(finished, recipe, monkeypatch):
    import regard.comparison.variant_runs as variant_runs

    folder, _ = finished
    started = []
    monkeypatch.setattr(variant_runs, "_run_all", lambda jobs, workers: iter(started.append(jobs) or ()))
    compare(recipe("training.learning_rate=0.5", **OPTIONS), folder)
    compare(recipe(**{**OPTIONS, "measure": "exact"}), folder)
    source = next(iter((folder / "runs").glob("dot-1-*.json")))
    damaged = source.read_text()
    source.write_text(damaged[:-10])
    compare(recipe(**OPTIONS), folder)
    source.write_text(damaged)
    assert [len(jobs) for jobs in started] == [4, 4, 1]


def test_a_changed_text_is_another_run(recipe, tmp_path):
    from regard.comparison.run_record import file_checksums
    from regard.comparison.variants import make_variants

    experiment: Any = make_variants(recipe(**OPTIONS))[0].experiment
    data = experiment.data
    before = file_checksums(experiment)
    assert set(before) == {"data.train.source", "data.train.target", "data.test.source", "data.test.target"}
    for name in ("train", "test"):
        for side in ("src", "trg"):
            (tmp_path / f"{name}.{side}").write_bytes((data.folder / f"{name}.{side}").read_bytes())
    moved = experiment.model_copy(update={"data": data.model_copy(update={"folder": tmp_path})})
    assert file_checksums(moved) == before
    (tmp_path / "train.src").write_text("other")
    assert file_checksums(moved) != before
    (tmp_path / "train.src").unlink()
    with pytest.raises(CorpusError, match=r"data.train.source: .*train.src cannot be read \(No such file"):
        file_checksums(moved)


def test_a_record_is_read_by_its_own_key_alone(tmp_path):
    key, other = (RunKey({"seed": seed}, {}, {}) for seed in (1, 2))
    record = RunRecord([[1.0, 2.0]], 3, 4, 5.0, 6.0, None)
    record.save(tmp_path / "run.json", key)
    assert RunRecord.load(tmp_path / "run.json", key) == record
    assert RunRecord.load(tmp_path / "run.json", other) is None
    assert RunRecord.load(tmp_path / "none.json", key) is None


def test_a_variant_that_cannot_be_trained_says_why_and_the_others_run(recipe, tmp_path):
    lines = []
    # A dot product needs queries and keys of one width; location needs a length.
    chosen = recipe(vary={"score": ["general", "location"]}, seeds=[1])
    report = compare(chosen, tmp_path, progress=lines.append)
    assert [one.name for one in report.refused] == ["location"]
    assert lines[0].startswith(
        "location cannot be trained: model: the score 'location' has one weight per source position"
    )
    assert [row[0] for row in report.cells()] == ["variant", "general"]
    assert any(note.startswith("location cannot be trained: ") for note in report.notes())
    # One seed: no interval.
    assert report.results[0].interval is None
    assert "95 % interval" not in report.cells()[0]
    assert "one seed, 1: no interval is claimed" in str(report)


def test_what_only_training_finds_is_a_reason_too(recipe, tmp_path):
    report = compare(recipe(vary={"model.hidden_dim": [8, 9]}, seeds=[1, 2]), tmp_path)
    assert str(report.refused[0].reason).startswith("model.hidden_dim is 9; it needs to be even")
    assert [one.seeds for one in report.results] == [[1, 2], []]


def test_where_the_first_variant_cannot_be_trained_the_next_one_is_the_baseline(recipe, tmp_path):
    report = compare(recipe(vary={"model.hidden_dim": [9, 8, 6]}, seeds=[1]), tmp_path)
    assert report.baseline == "8"
    assert [one.p_value is None for one in report.results] == [True, True, False]
    assert "against 8" in report.cells()[0]
    assert "adjusted by Holm for 1 tests" in str(report)


def test_a_named_baseline_stays_one_and_nothing_is_tested_without_it(recipe, tmp_path):
    report = compare(recipe(vary={"model.hidden_dim": [8, 9]}, seeds=[1], baseline="9"), tmp_path)
    assert report.baseline == "9"
    assert "p" not in report.cells()[0]
    assert "p: none, as there are no two variants to compare, of which one is the baseline '9'" in str(report)
    assert "p is about the test set" not in str(report)


def test_gradients_need_projections(recipe, tmp_path):
    with pytest.raises(ConfigurationError, match="the recurrent model of the variant 'dot' has none: leave it out"):
        compare(recipe(**OPTIONS, gradients=True), tmp_path)
    with pytest.raises(ConfigurationError, match="workers is 0; it needs at least 1"):
        compare(recipe(**OPTIONS), tmp_path, workers=0)


@pytest.mark.slow
def test_a_comparison_that_is_killed_goes_on_from_its_finished_runs(recipe_file, tmp_path, warm_training):
    folder = tmp_path / "comparison"
    command = [
        *warm_training, "-c", "from regard_command import main; main()",
        "compare", recipe_file, "--vary", "score=dot,general", "--folder", folder,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    waited = time.monotonic()
    while not list(folder.glob("runs/*.json")):
        assert time.monotonic() - waited < 120
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    time.sleep(1)
    done = len(list(folder.glob("runs/*.json")))
    assert done < 4
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    found = re.search(r"(\d) of 4 runs are there already", second.stderr)
    assert found is not None
    assert int(found[1]) >= 1
    assert second.stdout.splitlines()[0].startswith("variant")
