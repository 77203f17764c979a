import pytest
import torch

from regard.errors import ConfigurationError
from regard.exercises import CODING_EXERCISES, check_answer, coding_exercise
from regard.exercises.code_mistakes import CODE_MISTAKES
from regard.exercises.coding_exercise import FIRST_LINE, HOLE, KOREAN
from regard.exercises.formula_cases import FormulaCases

EXERCISES = [pytest.param(exercise, id=name) for name, exercise in CODING_EXERCISES.items()]


def answered(tmp_path, name: str, *changes: tuple[str, str]):
    """A file with the solution of an exercise, in which texts are replaced."""
    text = f"{FIRST_LINE.format(name)}\n{coding_exercise(name).solution}"
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "answer.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_solution_is_right_and_its_file_with_holes_is_not_filled_in(exercise, tmp_path):
    verdict = check_answer(answered(tmp_path, exercise.name))
    assert verdict.right, verdict.fault
    assert verdict.cases == len(exercise.cases)
    for language in ("en", "ko"):
        path = tmp_path / f"{language}.py"
        exercise.write(path, language)
        holes = check_answer(path)
        assert not holes.right
        assert len(holes.holes) == len(HOLE.findall(exercise.solution)) >= 1
        lines = path.read_text("utf-8").splitlines()
        assert all("= ...  # " in lines[at - 1] or "return ...  # " in lines[at - 1] for at in holes.holes)


def test_every_hole_has_its_korean_and_no_more():
    said = {match["said"] for exercise in CODING_EXERCISES.values() for match in HOLE.finditer(exercise.solution)}
    assert said == {*KOREAN}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(name, mistake, id=f"{name}: {mistake.said.en}")
        for name, mistakes in CODE_MISTAKES.items()
        for mistake in mistakes
    ],
)
def test_a_likely_mistake_is_wrong_and_is_named(tmp_path, name, mistake):
    """And no other is named with it."""
    path = answered(tmp_path, name, ("from torch import Tensor", "import math, torch; from torch import Tensor"))
    text = path.read_text("utf-8")
    for before, after in mistake.changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text, "utf-8")
    verdict = check_answer(path)
    assert not verdict.right
    assert verdict.fault is not None
    assert "the truth is" in verdict.fault
    assert verdict.likely == (mistake.said,)
    assert mistake.said.ko


def test_every_exercise_has_likely_mistakes():
    assert {*CODE_MISTAKES} == {*CODING_EXERCISES}


def test_the_mistake_of_another_formula_is_not_guessed(tmp_path):
    verdict = check_answer(answered(tmp_path, "rotary", ("frequencies  # hole", "frequencies * 2  # hole")))
    assert not verdict.right
    assert verdict.likely == ()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "luong",
            "state @ matrix @ annotations.mT",
            'torch.einsum("...mh,ha,...na->...mn", state, matrix, annotations)',
        ),
        ("luong", "(both @ combine.mT).tanh()", "torch.tanh(torch.nn.functional.linear(both, combine))"),
        ("sinusoidal", "10000.0 ** (-torch.arange(0, dim, 2) / dim)", "1 / 10000 ** (torch.arange(0, dim, 2) / dim)"),
        (
            "sinusoidal",
            "10000.0 ** (-torch.arange(0, dim, 2) / dim)",
            "torch.exp(torch.arange(0, dim, 2) * (-9.210340371976184 / dim))",
        ),
        (
            "rotary",
            "10000.0 ** (-torch.arange(half) / half)",
            "torch.exp(torch.arange(half) * (-9.210340371976184 / half))",
        ),
        ("rotary", "10000.0 ** (-torch.arange(half) / half)", "1 / 10000 ** (2 * torch.arange(half) / (2 * half))"),
        ("transformer-block", "(x @ up).relu()", "(x @ up).clamp(min=0)"),
        (
            "transformer-block",
            "centred / (variance + 1e-5).sqrt()",
            "__import__('torch').nn.functional.layer_norm(rows, rows.shape[-1:])",
        ),
    ],
)
def test_another_way_to_write_the_formula_is_right(tmp_path, name, before, after):
    verdict = check_answer(answered(tmp_path, name, (before, after)))
    assert verdict.right, verdict.fault


def test_a_gradient_that_is_lost_is_found(tmp_path):
    verdict = check_answer(answered(tmp_path, "luong", ("weights @ annotations", "weights @ annotations.detach()")))
    assert verdict.fault is not None
    assert "gradient of annotations: " in verdict.fault


@pytest.mark.parametrize("name", ["luong", "sinusoidal", "rotary", "transformer-block"])
def test_a_formula_is_that_of_the_library(name):
    """The formulas that mark answers, in float64, against the library's own mechanisms."""
    import regard
    from regard.nn import Attention, FeedForward, PostNorm, Projections, TransformerBlock
    from regard.positions import Rotary, Sinusoidal
    from regard.scores import General

    cases = coding_exercise(name).cases
    assert isinstance(cases, FormulaCases)
    generator = torch.Generator().manual_seed(5)
    given = {
        argument: shape if isinstance(shape, torch.Tensor) else torch.randn(shape, generator=generator).double()
        for argument, shape in cases.draws[1].items()
    }
    right = cases.formula(**given)
    if name == "luong":
        score = General(11, 13).double()
        score.weight.data = given["matrix"]
        context = regard.attention(given["state"], given["annotations"], given["annotations"], score=score)
        expected = (torch.cat([context, given["state"]], -1) @ given["combine"].mT).tanh()
    elif name == "sinusoidal":
        expected = given["embeddings"] + Sinusoidal(6)(torch.arange(17)).double()
    elif name == "rotary":
        expected = Rotary(dim=6).rotate(given["rows"], given["positions"])
    else:
        attention = Attention(Projections(13, num_heads=1, head_dim=5, value_dim=11, bias=False))
        block = TransformerBlock(attention, FeedForward(13, 29, bias=False), lambda: PostNorm(torch.nn.LayerNorm(13)))
        own = {**dict(attention.projections.named_children()), **dict(block.feed_forward.named_children())}
        for matrix in ("query", "key", "value", "output", "up", "down"):
            own[matrix].weight.data = given[matrix].mT
        expected = block.double()(given["x"].flatten(0, 1)).view_as(right)
    torch.testing.assert_close(right, expected)


@pytest.mark.parametrize(
    ("name", "before", "after", "code"),
    [
        ("scaled-dot-product", "softmax(dim=-1)", "softmax(dim=-2)", "ATT111"),
        ("scaled-dot-product", " / math.sqrt(query.shape[-1])", "", "ATT101"),
        ("causal-mask", "~keep", "keep", ""),
        ("causal-mask", "tril(keys - queries)", "tril()", ""),
        ("multi-head", "math.sqrt(query.shape[-1])", "math.sqrt(query.shape[-1] * heads)", ""),
        ("multi-head", "unflatten(-1, (heads, -1))", "unflatten(-1, (-1, heads)).mT", ""),
        ("grouped-query", "key.repeat_interleave(group, dim=-3)", "key.tile(group, 1, 1)", ""),
        ("online-softmax", "shrink * total + ", "total + ", ""),
        ("online-softmax", "summed / total", "summed", ""),
        ("additive", "sums.tanh() @ weight", "sums @ weight", ""),
        ("cache", "torch.cat([cache[1], value], dim=-2)", "torch.cat([value, cache[1]], dim=-2)", ""),
    ],
)
def test_a_wrong_answer_is_found_shown_in_small_and_explained(tmp_path, name, before, after, code):
    verdict = check_answer(
        answered(tmp_path, name, (before, after), ("import math\n", "import math\nimport torch\n"))
        if "torch." in after and "import torch" not in coding_exercise(name).solution
        else answered(tmp_path, name, (before, after))
    )
    assert not verdict.right
    assert verdict.fault is not None
    assert verdict.example is not None
    assert "the truth is" in verdict.fault
    assert not code or code in [finding.code for finding in verdict.findings]


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("key.mT", "key", r"line 14: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("return weights @ value", "return None", r"TypeError: the result is None, and no tensor"),
        ("import math\n", "import math\n\nraise KeyError('x')\n", r"line 6: KeyError: 'x'"),
        ("def attention", "def attentive", r"KeyError: 'attention'"),
        ("return weights @ value", "return (weights @ value).sum()", r"the shape is \(\), but it has to be \(5, 17\)"),
        ("return weights @ value", "return (weights @ value).detach()", r"does not require grad"),
    ],
)
def test_what_a_file_raises_is_its_result(tmp_path, before, after, fault):
    verdict = check_answer(answered(tmp_path, "scaled-dot-product", (before, after)))
    assert verdict.fault is not None
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(verdict.fault)


def test_files_that_are_no_exercise_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.py cannot be read: No such file"):
        check_answer(tmp_path / "none.py")
    (tmp_path / "mine.py").write_text("import torch\n")
    with pytest.raises(ConfigurationError, match=r"begins with 'import torch'; an exercise begins with"):
        check_answer(tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text("# regard exercise multihead\n")
    with pytest.raises(ConfigurationError, match=r"no coding exercise 'multihead'; did you mean 'multi-head'\?"):
        check_answer(tmp_path / "mine.py")
    path = answered(tmp_path, "cache", ("return context", "return context)"))
    with pytest.raises(ConfigurationError, match=r"line 23: unmatched '\)': mend it, and check again"):
        check_answer(path)
    path.write_bytes("# regard exercise cache\n# 캐시".encode("cp949"))
    with pytest.raises(ConfigurationError, match=r"answer.py is not UTF-8"):
        check_answer(path)


def test_a_file_is_not_overwritten(tmp_path):
    exercise = coding_exercise("cache")
    exercise.write(tmp_path / "cache.py")
    with pytest.raises(ConfigurationError, match=r"is there already, and may have your answers: name another file"):
        exercise.write(tmp_path / "cache.py")
    with pytest.raises(ConfigurationError, match=r"cache.txt does not end in .py"):
        exercise.write(tmp_path / "cache.txt")
    with pytest.raises(ConfigurationError, match=r"language is 'fr'"):
        exercise.template("fr")
