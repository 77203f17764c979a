"""Generation without a cache is a mistake where the model is seen to keep its keys, and else a hint, or nothing."""

import textwrap
from pathlib import Path

import pytest

from regard.doctor import CodeFinding, Severity, diagnose
from regard_doctor.diagnosis import diagnose_file

IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
MODEL = """
class Reader(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
BOTH_WAYS = MODEL.replace(", is_causal=True", "")
MASKED = BOTH_WAYS.replace("(self, x)", "(self, x, mask=None)").replace("k, v)", "k, v, attn_mask=mask)")
CACHED = MASKED.replace("mask=None", "past_key_values=None").replace(", attn_mask=mask", "")
LOOP = """
def generate(model: Reader, x, steps):
    for _ in range(steps):
        x = torch.cat([x, model(x)[:, -1:]], dim=1)
    return x
"""
NO_KEYS = """
class Reader(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mixed = Mixer(dim)

    def forward(self, x):
        return self.mixed(x)

class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.one, self.gate = nn.Linear(dim, dim), nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.one(x) * self.gate
"""
WRAPPER = """
class Writer(nn.Module):
    def __init__(self, net: Reader):
        super().__init__()
        self.net = net

    def generate(self, x, steps):
        for _ in range(steps):
            x = torch.cat([x, self.net(x)[:, -1:]], dim=1)
        return x
"""


def about_generation(found: list[CodeFinding]) -> list[CodeFinding]:
    return [one for one in found if one.code == "ATT511"]


@pytest.mark.parametrize("model", [MODEL, CACHED], ids=["a causal mask", "a cache that is not passed"])
@pytest.mark.parametrize("loop", [LOOP, WRAPPER], ids=["a function", "a class that is given its model"])
def test_a_model_whose_keys_stay_is_a_mistake(model: str, loop: str) -> None:
    (finding,) = about_generation(diagnose(IMPORTS + model + loop))
    assert finding.severity is Severity.WARNING
    assert finding.message == "each step computes all of `x` again: keep keys and values in a cache"


def test_one_loop_for_models_of_several_kinds_leaves_a_doubt() -> None:
    others = NO_KEYS.replace("Reader", "Gated")
    loop = LOOP.replace("model: Reader", "model")
    made = "model = Reader(8)\nif kind == 'gate':\n    model = Gated(8)\n"
    (finding,) = about_generation(diagnose(IMPORTS + MODEL + others + loop + made))
    assert finding.severity is Severity.HINT
    (finding,) = about_generation(diagnose(IMPORTS + MODEL + others + loop + "model = Reader(8)\n"))
    assert finding.severity is Severity.WARNING


def test_layers_of_the_file_within_a_sequence_of_modules_are_read() -> None:
    source = """
    class Lm(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.layers = nn.Sequential(*[Reader(dim) for _ in range(2)])

        def forward(self, x):
            return self.layers(x)

        def generate(self, x, steps):
            for _ in range(steps):
                x = torch.cat([x, self(x)[:, -1:]], dim=1)
            return x
    """
    (finding,) = about_generation(diagnose(IMPORTS + MODEL + textwrap.dedent(source)))
    assert finding.severity is Severity.WARNING


def test_a_model_of_transformers_takes_a_cache() -> None:
    loop = """
    from transformers import GPT2LMHeadModel

    def generate(tokens, steps):
        model = GPT2LMHeadModel.from_pretrained("gpt2")
        for _ in range(steps):
            logits = model(tokens).logits
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return tokens.softmax(-1)
    """
    for read in ("model(tokens).logits", "model(tokens)[0]", "model(tokens)"):
        (finding,) = about_generation(diagnose(IMPORTS + textwrap.dedent(loop).replace("model(tokens).logits", read)))
        assert finding.severity is Severity.WARNING


def test_a_mask_of_the_caller_leaves_a_doubt() -> None:
    (finding,) = about_generation(diagnose(IMPORTS + MASKED + LOOP))
    assert finding.severity is Severity.HINT
    assert finding.message.endswith(", unless its tokens see later ones")


def test_a_model_of_a_file_that_is_not_there_leaves_a_doubt() -> None:
    (finding,) = about_generation(diagnose(IMPORTS + "from models import Reader\n" + LOOP + "softmax = F.softmax\n"))
    assert finding.severity is Severity.HINT
    assert finding.message.endswith(", unless the model has no keys, or its tokens see later ones")


@pytest.mark.parametrize("model", [BOTH_WAYS, NO_KEYS], ids=["attention both ways", "no attention"])
def test_a_model_whose_keys_change_is_no_finding(model: str) -> None:
    assert about_generation(diagnose(IMPORTS + model + LOOP + "softmax = F.softmax\n")) == []


@pytest.mark.parametrize("imported", ["from .reader import Reader", "from project.reader import Reader"])
@pytest.mark.parametrize(("model", "severity"), [(MODEL, Severity.WARNING), (MASKED, Severity.HINT), (NO_KEYS, None)])
def test_a_model_of_the_same_project_is_read(
    tmp_path: Path, imported: str, model: str, severity: Severity | None
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "reader.py").write_text(IMPORTS + model)
    (folder / "sampling.py").write_text(f"{IMPORTS}{imported}\n{LOOP}softmax = F.softmax\n")
    found = about_generation(diagnose_file(folder / "sampling.py"))
    assert [one.severity for one in found] == ([severity] if severity else [])


def test_a_name_that_is_passed_on_is_followed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "reader.py").write_text(IMPORTS + MODEL)
    (models / "__init__.py").write_text("from .reader import Reader\n")
    (tmp_path / "sample.py").write_text(f"{IMPORTS}from models import Reader\n{LOOP}softmax = F.softmax\n")
    (finding,) = about_generation(diagnose_file(tmp_path / "sample.py"))
    assert finding.severity is Severity.WARNING


def test_a_file_that_does_not_parse_leaves_a_doubt(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text("class Reader(:\n")
    (tmp_path / "sample.py").write_text(f"{IMPORTS}from reader import Reader\n{LOOP}softmax = F.softmax\n")
    (finding,) = about_generation(diagnose_file(tmp_path / "sample.py"))
    assert finding.severity is Severity.HINT
