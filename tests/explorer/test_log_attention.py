"""A callback that logs attention while a model is trained: what is logged, and that nothing else changes."""

import io
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import PIL.Image
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, TENSORS, EventAccumulator
from torch import nn

import regard
from regard.errors import ConfigurationError
from regard.explorer import Atlas, log_attention, record
from regard.explorer.log_attention import LogAttention
from regard.explorer.preview import heads_picture

LENGTH = 53
WORDS = [f"w{number % 5}" for number in range(LENGTH)]
TEXT = 0.3 * torch.randn(1, LENGTH, 16, generator=torch.Generator().manual_seed(0))
NAMES = ["layers.0.0", "layers.1.0"]


class Training(lightning.LightningModule):
    """Two layers with everything that a look could disturb: dropout, statistics of batches, a part that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Sequential(
                regard.nn.Attention(regard.nn.Projections(16, num_heads=2), mask=regard.masks.causal(), dropout=0.1),
                nn.Dropout(0.2),
                nn.Flatten(0, 1),
                nn.BatchNorm1d(16),
                nn.Unflatten(0, (-1, LENGTH)),
            )
            for _ in range(2)
        )
        self.losses = []

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden

    def training_step(self, batch):
        self.layers.get_submodule("1.3").eval()  # a mode of its own
        loss = (self(batch[0]) - batch[0].roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def trained(folder, log, steps=7, logger=True):
    """A training on random batches, by a fixed seed."""
    lightning.seed_everything(5, verbose=False)
    module = Training()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, LENGTH, 16)), 4, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=steps,
        logger=TensorBoardLogger(folder, name="run", version="1") if logger else False,
        callbacks=[log] if log else [],
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    return module, trainer


def looking(**options):
    settings = {"tokens": WORDS, "every": 2, "share": 1.0} | options
    return LogAttention(lambda module: module(TEXT), **settings)


@pytest.fixture(autouse=True)
def plenty_of_time(monkeypatch):
    """A clock by which each call of it takes a second, so that what is looked at depends on no machine."""
    monkeypatch.setattr(log_attention.time, "perf_counter", iter(range(10**6)).__next__)


@pytest.mark.filterwarnings("ignore")
def test_the_training_is_the_same_to_the_bit(tmp_path):
    """Weights, statistics, losses, the optimizer, modes and random numbers."""
    ends = []
    for log in (None, looking()):
        module, trainer = trained(tmp_path / str(log is None), log)
        optimizer = trainer.optimizers[0].state_dict()["state"]
        modes = [part.training for part in module.modules()]
        ends.append((module.state_dict(), module.losses, optimizer, modes, torch.get_rng_state()))
    plain, logged = ends
    assert plain[0].keys() == logged[0].keys()
    assert all(torch.equal(plain[0][name], logged[0][name]) for name in plain[0])
    assert plain[1] == logged[1]
    for number, moments in plain[2].items():
        assert all(torch.equal(moments[name], logged[2][number][name]) for name in moments)
    assert plain[3] == logged[3]
    assert torch.equal(plain[4], logged[4])
    assert len(list((tmp_path / "False").rglob("*.atlas"))) == 5  # so that there was something to disturb


def events(folder):
    found = EventAccumulator(str(folder), size_guidance={IMAGES: 0, SCALARS: 0, TENSORS: 0})
    found.Reload()
    return found


@pytest.mark.filterwarnings("ignore")
def test_pictures_entropies_and_roles_are_those_of_the_model_at_each_step(tmp_path):
    module, trainer = trained(tmp_path, looking())
    steps = [0, 2, 4, 6, 7]
    found = events(trainer.log_dir)
    assert found.Tags()["images"] == [f"attention/{name}" for name in NAMES]
    for name in NAMES:
        assert [event.step for event in found.Images(f"attention/{name}")] == steps
    module.eval()
    with torch.no_grad(), record(module) as recording:
        module(TEXT)
    atlas = recording.atlas(tokens=WORDS)
    moved = False
    for of in atlas.maps:
        for head in range(2):
            logged = found.Scalars(f"entropy of {of.name}/head {head}")
            assert [event.step for event in logged] == steps
            assert logged[-1].value == pytest.approx(float(of.metrics["entropy"][head]), rel=1e-6)
            moved |= logged[0].value != logged[-1].value
        drawn = found.Images(f"attention/{of.name}")[-1]
        assert (drawn.height, drawn.width) == heads_picture(of).shape[:2]
        np.testing.assert_array_equal(decoded(drawn.encoded_image_string), heads_picture(of))
    assert moved
    counts = {
        role: sum(each["name"] == role for of in atlas.maps for roles in of.roles for each in roles)
        for role in ("previous token", "sink", "diffuse", "self")
    }
    for role, count in counts.items():
        assert found.Scalars(f"heads with a role/{role}")[-1].value == count
    assert sum(counts.values()) > 0
    (table,) = [event for event in found.Tensors("roles/text_summary") if event.step == 7]
    text = table.tensor_proto.string_val[0].decode()
    assert text.startswith("| map | head | role | score | n |")
    assert text.count("\n") == 1 + sum(len(roles) for of in atlas.maps for roles in of.roles)


def decoded(png):
    """Pixels of a PNG in RGB."""

    return np.asarray(PIL.Image.open(io.BytesIO(png)))


@pytest.mark.filterwarnings("ignore")
def test_the_atlases_are_a_series(tmp_path):
    module, _ = trained(tmp_path, looking(folder=tmp_path / "series", maps=NAMES[1:]))
    files = sorted((tmp_path / "series").iterdir())
    assert [file.name for file in files] == [f"step-{step:08}.atlas" for step in (0, 2, 4, 6, 7)]
    last = Atlas.open(files[-1])
    assert last.title == "step 7"
    assert [of.name for of in last.maps] == NAMES
    assert last.maps[0].query_tokens == tuple(WORDS)
    assert events(tmp_path / "run" / "1").Tags()["images"] == ["attention/layers.1.0"]
    with torch.no_grad(), record(module.eval()) as recording:
        module(TEXT)
    everything = slice(0, LENGTH), slice(0, LENGTH)
    np.testing.assert_array_equal(
        last.maps[1].weights(1, *everything), recording.atlas().maps[1].weights(1, *everything)
    )


@pytest.mark.filterwarnings("ignore")
def test_without_a_logger_there_are_atlases_alone(tmp_path):
    trained(tmp_path, looking(), logger=False)
    assert len(list((tmp_path / "attention").iterdir())) == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("share", "looks"), [(1.0, 20), (0.2, 2), (0.01, 1)])
def test_looks_take_no_more_than_their_share(tmp_path, monkeypatch, share, looks):
    """By a clock on which a look takes 1 s, and a training step 0.5 s."""
    now = [0.0]
    monkeypatch.setattr(log_attention.time, "perf_counter", lambda: now[0])

    class Ticking(Training):
        def training_step(self, batch):
            now[0] += 0.5
            return super().training_step(batch)

    monkeypatch.setitem(globals(), "Training", Ticking)

    def run(module):
        now[0] += 1.0
        module(TEXT)

    log = LogAttention(run, every=1, share=share, folder=tmp_path / "series")
    trained(tmp_path, log, steps=20)
    spent = len(list((tmp_path / "series").iterdir()))
    assert log.seconds == spent
    assert spent == 1 or spent <= share * now[0]
    assert spent == looks


def test_a_picture_has_the_colours_of_the_explorer():
    of = Atlas.from_weights({"a": torch.eye(2)[None]}).maps[0]
    assert heads_picture(of).shape == (60, 60, 3)
    assert heads_picture(of)[10, 10].tolist() == [253, 231, 37]
    assert heads_picture(of)[10, 50].tolist() == [68, 1, 84]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0}, "share is 0; it needs to be above 0 and at most 1"),
        ({"share": True}, "share is True"),
        ({"every": 0}, "every is 0; it needs"),
    ],
)
def test_settings_that_are_none_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        looking(**options)


@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_said_before_the_first_update(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"maps has 'layers.9'; the model has the attention modules layers.0.0, "
    ):
        trained(tmp_path, looking(maps=["layers.9"]))


def test_sharded_weights_are_refused(monkeypatch):
    trainer: Any = type("Trainer", (), {"strategy": FSDPStrategy.__new__(FSDPStrategy)})()
    with pytest.raises(ConfigurationError, match="with FSDPStrategy none has all of its weights"):
        looking().on_train_start(trainer, Training())
