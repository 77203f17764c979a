"""A saved model comes back bit for bit, and no crash leaves half of one."""

import json
import subprocess

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import LanguageModel
from regard.models.language_model import (
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedExpertsConfig,
    GatedFeedForwardConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    LayerNormConfig,
    NormalizerConfig,
    RMSNormConfig,
    RouterConfig,
    saved_model,
)
from regard.positions import NTK, DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, YaRN

safetensors = pytest.importorskip("safetensors.torch")

SCALINGS = [
    None,
    LinearScaling(2.0),
    NTK(3.0),
    DynamicNTK(2.0, 8),
    YaRN(2.0, 8, truncate=False, attention_factor=1.5),
    Llama3(2.0, 8, high_frequency_factor=5.0),
    LongRoPE([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0], 8, 2.0),
]
KINDS = {
    "as it is": {},
    "tied": {"tied": True, "embedding_scale": 32**0.5, "logit_softcap": 30.0},
    "layer norms": {"norm": LayerNormConfig(bias=False), "feed_forward": FeedForwardConfig(40, "relu")},
    "sandwich": {"sandwich": True, "norm": RMSNormConfig(1e-5, offset=1.0), "dropout": 0.25},
    "experts": {"feed_forward": ExpertsConfig(24, 4, 2, limit=5.0)},
    "experts, one layer without": {
        "layers": [LayerConfig(feed_forward=GatedFeedForwardConfig(20)), LayerConfig()],
        "feed_forward": GatedExpertsConfig(24, 4, 2, normalized=False, shared_dim=12),
    },
    "attention": {
        "attention": AttentionConfig(
            4, head_dim=10, bias=("query", "key"), norm=RMSNormConfig(), scale=0.5, dropout=0.1
        )
    },
    "normalizer": {"attention": AttentionConfig(4, normalizer=NormalizerConfig("entmax", 1.25))},
    "latent attention, an indexer": {
        "attention": LatentAttentionConfig(
            4,
            latent_dim=10,
            rotary_dim=8,
            head_dim=5,
            value_dim=7,
            query_latent_dim=9,
            bias=True,
            norm=RMSNormConfig(1e-4),
            scale=0.3,
            indexer=IndexerConfig(6, 8, 4, "interleaved"),
            dropout=0.1,
        ),
        "feed_forward": GatedExpertsConfig(
            24, 6, 2, shared_dim=12, shared_gate=False, router=RouterConfig("sigmoid", 3, 2, 1.5)
        ),
    },
    "rotaries": {"layers": [LayerConfig(before=6, prefix=2, rotary=Rotary(8, scaling=each)) for each in SCALINGS]},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_what_was_saved_comes_back(changes, dtype, make, tmp_path):
    model, tokens = make(**changes).to(dtype), torch.randint(0, 61, (2, 9))
    model.save(tmp_path / "new" / "folder")
    again = LanguageModel.load(tmp_path / "new" / "folder")
    assert again.config == model.config
    assert not again.training
    state = again.state_dict()
    assert list(state) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor)
        assert state[name].dtype == dtype
    assert torch.equal(again(tokens), model(tokens))


def test_what_was_loaded_can_be_trained(make, tmp_path):
    make().save(tmp_path)
    model = LanguageModel.load(tmp_path)
    model(torch.arange(5)[None]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_folder_holds_two_files_however_often_it_is_saved_to(make, tmp_path):
    for _ in range(3):
        model = make()
        model.save(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 2
        assert names[0] == "config.json"
        assert names[1].endswith(".safetensors")
        assert torch.equal(LanguageModel.load(tmp_path).embedding.weight, model.embedding.weight)


@pytest.mark.parametrize("place", ["write_tensors", "write_json"])
def test_a_failure_leaves_what_was_there(place, make, tmp_path, monkeypatch):
    before = make()
    before.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())

    def fails(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(saved_model, place, fails)
    with pytest.raises(KeyboardInterrupt):
        make(tied=True).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.equal(LanguageModel.load(tmp_path).embedding.weight, before.embedding.weight)


KILLED = """
import json, os, sys, torch
sys.path.insert(0, {tests!r})
from regard.models.language_model import saved_model
from models.language_model.conftest import small
torch.set_num_threads(1)
def save_and_be_killed(place, after, folder):
    real = getattr(saved_model, place)
    def killed(*args):
        if after:
            real(*args)
        os._exit(9)
    setattr(saved_model, place, killed)
    small(tied=True).save(folder)
for arguments in json.loads({arguments!r}):
    child = os.fork()
    if not child:
        save_and_be_killed(*arguments)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_killed_process_leaves_a_whole_model(make, tmp_path, request, warm_python):
    kills = [("write_tensors", True), ("write_json", False), ("write_json", True)]
    folders = [str(tmp_path / f"{place}-{after}") for place, after in kills]
    for folder in folders:
        make().save(folder)
    arguments = json.dumps([(*kill, folder) for kill, folder in zip(kills, folders, strict=True)])
    program = KILLED.format(tests=str(request.path.parents[2]), arguments=arguments)
    done = subprocess.run([*warm_python, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["9"] * 3, done.stderr
    assert [LanguageModel.load(folder).config.tied for folder in folders] == [False, False, True]


def test_a_folder_of_something_else_is_not_written_to(make, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="belongs to something else: save into a folder of its own"):
        make().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_made(make, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        make().save(tmp_path / "file")


def altered(folder, **changes):
    path = folder / "config.json"
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            r"of a 'llama' model as transformers saves it.*LanguageModel.from_huggingface\(folder\)",
        ),
        ({"kind": "other"}, "its kind is 'other'"),
        ({"format": 2}, "has the format 2, and this regard reads 1: install a newer one"),
        ({"weights": "../model.safetensors"}, "the name of a file as weights"),
        ({"weights": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"model": {"kind": "LayerConfg"}}, "names 'LayerConfg', which is unknown here; did you mean 'LayerConfig'"),
        (
            {"model": {"kind": "LayerConfig", "after": 3}},
            "'LayerConfig' in the configuration has .*after.*; it needs 'kind' and",
        ),
        ({"model": {"kind": "LayerConfig"}}, "needs a LanguageModelConfig as model"),
    ],
)
def test_what_cannot_be_loaded_is_said(changes, message, make, tmp_path):
    make().save(tmp_path)
    altered(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        LanguageModel.load(tmp_path)


def test_weights_of_another_model(make, tmp_path):
    make().save(tmp_path)
    name = json.loads((tmp_path / "config.json").read_text())["weights"]
    tensors = safetensors.load_file(tmp_path / name)
    tensors["norm.weight"] = torch.zeros(3)
    del tensors["output.weight"]
    safetensors.save_file(tensors | {"more": torch.zeros(1)}, tmp_path / name)
    message = (
        r"1 missing \(output.weight\); 1 extra \(more\); "
        r"1 of another shape \(norm.weight: the file has \[3\], the model needs \[32\]"
    )
    with pytest.raises(CheckpointError, match=message):
        LanguageModel.load(tmp_path)


def test_a_scaling_that_is_not_ours_cannot_be_saved(make, tmp_path):
    class Mine(LinearScaling):
        pass

    with pytest.raises(CheckpointError, match="holds a Mine, which is none of regard's own"):
        make([LayerConfig(rotary=Rotary(8, scaling=Mine(2.0)))]).save(tmp_path)
