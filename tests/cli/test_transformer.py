"""The commands over a Transformer, from training to alignment."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from regard_command.app import app

OPTIONS = [
    "vocabulary={kind: words, size: 40, shared: true}",
    "model={kind: transformer, dim: 24, hidden_dim: 48, num_heads: 2, encoder_layers: 1, decoder_layers: 2, "
    "dropout: 0.0, norm: pre, shared_embeddings: all}",
    "training.betas=[0.9, 0.98]",
    "training.keep_last=3",
    "training.validate_every=1.0",
    "training.max_epochs=16",
]


@pytest.fixture(scope="session")
def attentive(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained Transformer."""
    folder = tmp_path_factory.mktemp("runs") / "attentive"
    told = [argument for option in OPTIONS for argument in ("--set", option)]
    result = CliRunner().invoke(app, ["train", str(corpus / "digits.yaml"), "--folder", str(folder), *told])
    assert result.exit_code == 0, result.stderr
    return folder


def test_it_translates_as_any_other(regard, attentive):
    lines = regard("translate", "--checkpoint", attentive, input="1 2 3\n\n4\n").stdout.splitlines()
    # Where a line ends is what so small a model learns last: the number of threads decides it.
    assert [line.split(" ")[0] for line in lines] == ["eins", "", "vier"]


def test_its_last_weights_are_averaged_and_used(regard, attentive, corpus):
    result = regard("average", "--checkpoint", attentive, "--last", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{attentive}/average.safetensors\n"
    assert re.fullmatch(r"the mean of 2 weights, after updates \d+, \d+\n", result.stderr)
    scored = regard("test", "--checkpoint", attentive, "--which", "average")
    assert scored.exit_code == 0, scored.stderr
    (chrf,) = re.findall(r"chrF +([\d.]+)", scored.stdout)
    assert float(chrf) > 80


def test_more_than_were_kept_cannot_be_averaged(regard, attentive, run):
    result = regard("average", "--checkpoint", attentive, "--best", 9)
    assert result.exit_code == 2
    assert "has kept 3 weights, and 9 were asked for" in result.stderr
    result = regard("average", "--checkpoint", run)
    assert result.exit_code == 2
    assert "has kept no weights" in result.stderr


def test_all_heads_are_kept_as_arrays(regard, attentive, tmp_path):
    file = tmp_path / "look.npz"
    assert regard("translate", "--checkpoint", attentive, "--attention", file, "1 2 3").exit_code == 0
    with np.load(file) as arrays:
        assert sorted(arrays) == ["1.self_weights", "1.source", "1.target", "1.weights"]
        length = len(arrays["1.target"])
        assert length >= 3
        assert arrays["1.weights"].shape == (length, 2, 2, 3)
        assert arrays["1.self_weights"].shape == (length, 2, 2, length)
        np.testing.assert_allclose(arrays["1.weights"].sum(axis=-1), 1, rtol=1e-5)


def test_a_head_is_drawn_and_aligned(regard, attentive, corpus, tmp_path):
    picture = tmp_path / "head.png"
    told = ["--checkpoint", attentive, "--layer", 1, "--head", 0]
    assert regard("translate", *told, "--attention", picture, "1 2").exit_code == 0
    assert picture.exists()
    files = ["--source", corpus / "test.digits", "--target", corpus / "test.words"]
    links = [regard("align", *options, *files).stdout.splitlines() for options in (told, told[:2])]
    lines = (corpus / "test.words").read_text(encoding="utf-8").splitlines()
    for some in links:
        assert [len(line.split()) for line in some] == [len(line.split()) for line in lines]
    assert links[0] != links[1]


def test_a_head_that_is_not_there_is_told(regard, attentive, corpus):
    files = ["--source", corpus / "test.digits", "--target", corpus / "test.words"]
    result = regard("align", "--checkpoint", attentive, *files, "--head", 2)
    assert result.exit_code == 2
    assert "there is no head 2: the model has 2 heads, 0 to 1" in result.stderr
