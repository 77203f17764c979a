"""`regard examine`."""

import json
from pathlib import Path

MODEL = """
import torch
from torch import nn


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(30, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids):
        return self.layer(self.embedding(ids))


def wrong():
    return 1


def needs(dim):
    return nn.Linear(dim, dim)
"""


def test_a_model_of_a_file(regard, tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    name = f"{tmp_path / 'model.py'}:Leaky"
    done = regard("examine", name, "--tokens", "20", "--causal", "--checks", "future")
    assert done.exit_code == 1
    assert "RUN101 error: future leak: outputs before position 1, 3, 7, 15 depend on tokens" in done.stdout
    done = regard("examine", name, "--tokens", "20", "--checks", "batch,rows", "--format", "json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["checked"] == ["batch", "rows"]


def test_wrong_settings_end_with_code_2(regard, tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    file = str(tmp_path / "model.py")
    for words, message in (
        ([], "examine needs a model"),
        ([f"{file}:wrong"], "wrong returns int, not a torch.nn.Module"),
        ([f"{file}:Missing"], "has no attribute 'Missing'"),
        ([f"{file}:Leaky", "--checks", "past"], "there is no check 'past'"),
        ([f"{file}:Leaky", "--tokens", "1"], "a batch needs a row and two tokens, not 2 of 1"),
        (["x", "--format", "xml"], "there is no format 'xml': text or json"),
        ([file], f"of {file} name one of {file}:Leaky, {file}:wrong, {file}:needs"),
        ([f"{file}x.py"], "and there is no such file"),
        ([f"{file}:needs"], "write a function that returns the model, and name that"),
    ):
        done = regard("examine", *words)
        assert done.exit_code == 2, words
        assert message in done.stderr
