"""Rewrites: before and after compute the same, gradients included; files are replaced as a whole."""

import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import regard
from regard.doctor import RuleSelection, diagnose
from regard_command.app import app
from regard_doctor.fixing import fix_files, fixed_source

IMPORTS = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"

FORMULAS = {
    "matmul": """
        def attend(q, k, v, mask):
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            weights = F.softmax(scores, dim=-1)
            return torch.matmul(weights, v)
    """,
    "one line": """
        def attend(q, k, v, mask):
            return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
    """,
    "another scale": """
        def attend(q, k, v, mask):
            scores = q @ k.transpose(-1, -2)
            scores = scores * 0.3
            return scores.softmax(dim=-1) @ v
    """,
    "no scale": """
        def attend(q, k, v, mask):
            x = (q @ k.transpose(2, 3)).softmax(-1)
            x = x @ v
            return x
    """,
    "division by a constant": """
        def attend(q, k, v, mask):
            scores = q.matmul(k.transpose(-2, -1))
            scores /= 7 + 1
            attn = nn.functional.softmax(scores, dim=-1)
            out = attn.matmul(v)
            return out
    """,
    "einsum": """
        def attend(q, k, v, mask):
            energy = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
            attention = torch.softmax(energy, dim=3)
            out = torch.einsum("bhql,bhld->bhqd", [attention, v])
            return out
    """,
    "filled": """
        def attend(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
            scores = scores.masked_fill(mask == 0, float("-inf"))
            weights = scores.softmax(dim=-1)
            return weights @ v
    """,
    "filled in place": """
        def attend(q, k, v, mask):
            hidden = ~mask
            scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
            scores.masked_fill_(hidden, -math.inf)
            return torch.softmax(scores, -1) @ v
    """,
    "perhaps filled": """
        def attend(q, k, v, mask=None):
            d_k = q.size(-1)
            # scores of all pairs
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, float("-inf"))
            p_attn = F.softmax(scores, dim=-1)
            return torch.matmul(p_attn, v)
    """,
    "added": """
        def attend(q, k, v, mask):
            bias = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype).masked_fill(~mask, -1e4)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + bias
            return scores.softmax(-1) @ v
    """,
    "causal": """
        def attend(q, k, v, mask):
            n = q.size(-2)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            future = torch.triu(torch.ones(n, n), diagonal=1).bool()
            scores = scores.masked_fill(future, -1e9)
            return scores.softmax(-1) @ v
    """,
    "causal, added": """
        def attend(q, k, v, mask):
            n = q.size(-2)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores + torch.full((n, n), float("-inf")).triu(1)
            return scores.softmax(-1) @ v
    """,
    "in float32": """
        def attend(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            return weights @ v
    """,
    "functional dropout": """
        def attend(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            weights = F.dropout(scores.softmax(-1), p=0.5, training=mask is None)
            return weights @ v
    """,
}

LAYER = """
    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads, self.dim = heads, dim
            self.scale = (dim // heads) ** -0.5
            self.qkv = nn.Linear(dim, 3 * dim)
            self.out = nn.Linear(dim, dim)
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            b, n, d = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            attn = (q @ k.transpose(-2, -1)) * self.scale
            attn = attn.softmax(dim=-1)
            attn = self.dropout(attn)
            x = (attn @ v).transpose(1, 2).reshape(b, n, d)
            return self.out(x)
"""


def compiled(source: str) -> dict:
    namespace = {"math": math, "torch": torch, "F": nn.functional, "nn": nn, "regard": regard}
    exec(source, namespace)
    return namespace


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 3, 7, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def results(attend, tensors, mask) -> list[torch.Tensor]:
    out = attend(*tensors, mask)
    return [out, *torch.autograd.grad(out.sin().sum(), tensors)]


@pytest.mark.parametrize("to", ["sdpa", "regard"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_rewrite_computes_the_same(name, to, tensors):
    source = IMPORTS + textwrap.dedent(FORMULAS[name])
    changed, fixes = fixed_source(source, to=to, selection=RuleSelection(ignore=("ATT1",)))
    assert fixes == 1
    assert "softmax" not in changed
    assert ("scaled_dot_product_attention(" in changed) == (to == "sdpa")
    assert ("regard.attention(" in changed) == (to == "regard")
    mask = torch.rand(7, 7) < 0.6
    mask[torch.arange(7), torch.arange(7)] = True
    if name == "in float32":
        tensors = [tensor.float().detach().requires_grad_() for tensor in tensors]
    before, after = (results(compiled(one)["attend"], tensors, mask) for one in (source, changed))
    torch.testing.assert_close(after, before)


def test_a_formula_with_an_error_is_left_alone():
    source = IMPORTS + textwrap.dedent(FORMULAS["no scale"])
    assert fixed_source(source) == (source, 0)
    found = diagnose(source, selection=RuleSelection(select=("ATT101", "ATT901")))
    assert [(one.code, one.fixable) for one in found] == [("ATT101", False), ("ATT901", False)]
    excused = source.replace(".softmax(-1)", ".softmax(-1)  # regard: ignore[ATT101]")
    assert fixed_source(excused)[1] == 1


@pytest.mark.parametrize("to", ["sdpa", "regard"])
def test_a_layer_is_rewritten(to):
    source = IMPORTS + textwrap.dedent(LAYER)
    changed, fixes = fixed_source(source, to=to)
    assert fixes == 1
    assert "dropout_p=self.dropout.p if self.training else 0.0" in changed
    layers = [compiled(one)["Layer"](12, 3).double().eval() for one in (source, changed)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(layers[1](x), layers[0](x))
    torch.testing.assert_close(*([layer(x).sum().backward(), layer.qkv.weight.grad][1] for layer in layers))


@pytest.mark.parametrize("to", ["sdpa", "regard"])
def test_an_optional_mask_may_be_left_out(to, tensors):
    source = IMPORTS + textwrap.dedent(FORMULAS["perhaps filled"])
    changed, _ = fixed_source(source, to=to)
    before, after = (results(compiled(one)["attend"], tensors, None) for one in (source, changed))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    "source",
    [
        """
        def returned(q, k, v):
            weights = (q @ k.mT / 8).softmax(-1)
            return weights @ v, weights
        """,
        """
        def finite(q, k, v, mask):
            scores = (q @ k.mT / 8).masked_fill(mask, -1e9)
            return scores.softmax(-1) @ v
        """,
        """
        def rebound(q, k, v):
            scores = q @ k.mT / 8
            q = q + 1
            return scores.softmax(-1) @ v + q
        """,
        """
        def used(q, k, v):
            scores = q @ k.mT / 8
            weights = scores.softmax(-1)
            print(scores)
            return weights @ v
        """,
        """
        def tensor_scale(q, k, v, scale):
            return (q @ k.mT * scale).softmax(-1) @ v
        """,
        """
        def other_axis(q, k, v):
            return (q @ k.mT / 8).softmax(-2) @ v
        """,
        """
        def stored(self, q, k, v):
            self.weights = (q @ k.mT / 8).softmax(-1)
            return self.weights @ v
        """,
        """
        def branches(q, k, v, far):
            if far:
                scores = q @ k.mT / 8
            else:
                scores = q @ k.mT / 4
            return scores.softmax(-1) @ v
        """,
        """
        def two_masks(q, k, v, one, other):
            scores = (q @ k.mT / 8).masked_fill(one, -math.inf).masked_fill(other, -math.inf)
            return scores.softmax(-1) @ v
        """,
    ],
)
def test_what_is_not_proven_stays(source):
    source = IMPORTS + textwrap.dedent(source)
    assert fixed_source(source) == (source, 0)


def test_unused_weights_are_not_computed():
    source = IMPORTS + textwrap.dedent(
        """
        class Block(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)

            def forward(self, x):
                y, _ = self.attn(
                    x,
                    x,  # keys
                    x,
                )
                return self.attn(x + y, x, x)[0]
        """
    )
    changed, fixes = fixed_source(source)
    assert fixes == 2
    assert "x,\n            need_weights=False,\n        )" in changed
    assert "self.attn(x + y, x, x, need_weights=False)[0]" in changed
    assert "# keys" in changed
    blocks = [compiled(one)["Block"](8).double() for one in (source, changed)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(blocks[1](x), blocks[0](x))


def test_comments_and_layout_stay():
    source = IMPORTS + textwrap.dedent(
        """
        def attend( q,k , v ):  # ü: three tensors
            ü = 1;  y = (q @ k.mT / 8).softmax(-1) @ v  # weighted
            return y
        """
    )
    changed, fixes = fixed_source(source)
    assert fixes == 1
    assert "def attend( q,k , v ):  # ü: three tensors\n" in changed
    assert "ü = 1;  y = F.scaled_dot_product_attention(q, k, v, scale=1 / 8)  # weighted\n" in changed


def test_torch_is_imported_where_it_is_missing():
    changed, _ = fixed_source("def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-1) @ v\n")
    assert changed.startswith("import torch\n")
    assert "torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1 / 8)" in changed
    changed, _ = fixed_source("def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-1) @ v\n", to="regard")
    assert changed.startswith("import regard\n")


LONG = """
class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.read = nn.Linear(dim, 3 * dim), nn.MultiheadAttention(dim, heads, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask, attention_mask):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(mask[:, :, :n, :n] == 0, float("-inf"))
        weights = self.drop(F.softmax(scores, dim=-1))
        read = weights @ v
        summary_of_the_context, _ = self.read(x, x, x, key_padding_mask=attention_mask)
        return read, summary_of_the_context


def attend(query, key, value, attention_mask):
    attention_scores = torch.matmul(query, key.transpose(-1, -2))
    attention_scores = attention_scores / math.sqrt(query.shape[-1])
    if attention_mask is not None:
        attention_scores = attention_scores + attention_mask
    attention_probs = nn.functional.softmax(attention_scores, dim=-1)
    context = torch.matmul(attention_probs, value)
    return context
"""


@pytest.mark.parametrize("to", ["sdpa", "regard"])
@pytest.mark.parametrize(
    ("name", "settings", "width"),
    [
        ("pyproject.toml", "", 88),
        ("pyproject.toml", "[tool.black]\nline-length = 79\n", 79),
        ("ruff.toml", "line-length = 110", 110),
    ],
)
def test_a_formatter_leaves_the_rewritten_file_alone(to, name, settings, width, tmp_path):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    (tmp_path / name).write_text(settings)
    path = tmp_path / "model.py"
    path.write_text(IMPORTS + "\n" + LONG)
    formatted = [str(ruff), "format", "-q", "--isolated", "--line-length", str(width), str(path)]
    subprocess.run(formatted, check=True)
    (changed,) = fix_files([path], to=to)
    assert changed.fixes == 3
    assert "None if attention_mask is None else attention_mask" not in path.read_text()
    written = path.read_text()
    subprocess.run(formatted, check=True)
    assert path.read_text() == written


# Files

FIXABLE = "import torch\n\n\ndef f(q, k, v):\r\n    return (q @ k.mT / 8).softmax(-1) @ v\r\n"


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "a.py").write_bytes(FIXABLE.encode())
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def git(folder, *arguments: str) -> None:
    name = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


def test_a_file_is_rewritten(doctor, tmp_path):
    result = doctor("a.py", "--fix")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == ["rewrote a.py: 1 fix", "nothing found in 1 file"]
    content = (tmp_path / "a.py").read_bytes()
    assert b"torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1 / 8)\r\n" in content
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".a")] == []


def test_what_is_not_selected_is_not_rewritten(doctor, tmp_path):
    assert doctor("a.py", "--fix", "--ignore", "ATT901").exit_code == 0
    assert (tmp_path / "a.py").read_bytes() == FIXABLE.encode()


def test_a_file_that_cannot_be_written_stays(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    result = doctor("a.py", "--fix")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert (tmp_path / "a.py").read_bytes() == FIXABLE.encode()


def test_a_dirty_tree_is_refused(doctor, tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "pyproject.toml").write_text("# changed\n")
    result = doctor(".", "--fix")
    assert result.exit_code == 2
    assert "has changes that are not committed (pyproject.toml)" in result.stderr
    assert "pass --allow-dirty" in result.stderr
    assert (tmp_path / "a.py").read_bytes() == FIXABLE.encode()
    assert doctor(".", "--fix", "--allow-dirty").exit_code == 0
    assert b"scaled_dot_product_attention" in (tmp_path / "a.py").read_bytes()


def test_a_clean_tree_is_rewritten(doctor, tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    assert doctor(".", "--fix", "--to", "regard").exit_code == 0
    assert b"regard.attention" in (tmp_path / "a.py").read_bytes()


def test_a_latin_file_keeps_its_encoding(doctor, tmp_path):
    content = b"# coding: latin-1\n# \xe4\n" + FIXABLE.encode()
    (tmp_path / "a.py").write_bytes(content)
    assert doctor("a.py", "--fix").exit_code == 0
    assert b"# \xe4\n" in (tmp_path / "a.py").read_bytes()
