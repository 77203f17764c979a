import pytest

from regard.comparison import ComparisonReport, load_recipe
from regard.comparison.comparison_report import VariantRuns
from regard.comparison.run_record import RunRecord


def record(quality: float) -> RunRecord:
    return RunRecord([[quality, 1.0]] * 4, 10, 5, 1.0, 2.0, None)


@pytest.fixture
def untrained(monkeypatch):
    """Reports of made-up runs in place of trainings; the recipes that were passed."""
    import regard.comparison

    passed = []

    def compare(recipe, folder, *, workers, progress):
        passed.append((recipe, folder, workers))
        folder.mkdir(parents=True)
        refused = "it has no data" if recipe.name == "refused" else None
        variants = [
            VariantRuns("one", {}, None, {seed: record(0.25) for seed in recipe.compare.seeds}),
            VariantRuns("two", {}, refused, {} if refused else {seed: record(1.0) for seed in recipe.compare.seeds}),
        ]
        return ComparisonReport(recipe, variants, workers)

    monkeypatch.setattr(regard.comparison, "compare", compare)
    return passed


def test_the_table_is_printed_and_the_files_are_named(regard, untrained, tmp_path):
    folder = tmp_path / "out"
    result = regard("compare", "dates", "--vary", "score=dot,general", "--seeds", "4,5", "--folder", folder)
    assert result.exit_code == 0, result.stderr
    recipe = untrained[0][0]
    assert (recipe.compare.vary, recipe.compare.seeds) == ({"score": ["dot", "general"]}, (4, 5))
    rows = [line.split()[:2] for line in result.stdout.splitlines()[3:5]]
    assert rows == [["one", "25.00"], ["two", "100.00"]]
    assert result.stderr.splitlines() == [
        str(folder / name) for name in ("table.md", "results.json", "figure.svg", "page.html")
    ]


def test_a_variant_that_was_refused_is_an_exit_code(regard, untrained, tmp_path):
    result = regard("compare", "dates", "--set", "name=refused", "--folder", tmp_path / "out", "--seeds", "1")
    assert result.exit_code == 2
    assert "two cannot be trained: it has no data" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "score", "--vary", "score=dot"], "--vary score is there twice; name all its values at once"),
        (["--seeds", "one"], "--seeds: has 'one'; it needs whole numbers with commas between, such as 1,2,3"),
        (["--set", "compare.sedes=[1]"], "dates: compare.sedes: unknown key; did you mean 'seeds'?"),
        (["--set", "name=a/b"], "which cannot be the name of a folder in comparisons"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_message(regard, words, message):
    result = regard("compare", "dates", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_keys_of_the_recipe_that_vary_are_replaced(tmp_path):
    recipe = load_recipe("dates", ["compare.vary={score: [dot, general]}"], {"seeds": [7]})
    assert recipe.compare.vary == {"score": ["dot", "general"]}
    assert recipe.compare.seeds == (7,)
