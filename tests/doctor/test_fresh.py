"""How many mistakes of the third set each half of the doctor finds; the running half none once they are mended."""

import pytest
from fresh_models import FRESH, FRESH_MODELS, fresh_mistakes
from planted_models import PlantedModel, examined, named
from test_evaluation import missed
from test_planted import load, needs_what_it_imports

pytestmark = pytest.mark.usefixtures("own_registrations")
MISTAKES = fresh_mistakes()
FOUND_BY_READING, FOUND_BY_EITHER = 13, 32
"""Mistakes that the static half names, and either half; raised with the rules, never lowered."""
NOT_FOUND = {
    ("unet_conditioning.py", "mask per head order"),
    ("time_first_translator.py", "cache forgets padding"),
    ("transformer_xl.py", "relative positions"),
    ("latent_attention.py", "wrong scale dim"),
    ("local_blocks.py", "padded keys"),
    ("local_blocks.py", "window off by one"),
}
"""Mistakes of models that run which `examine` does not name."""


def kind(entry: PlantedModel) -> str:
    (found,) = (one["kind"] for one in MISTAKES if (one["file"], one["line"]) == (entry.file, entry.lines[0]))
    return found


FOUND = [entry for entry in FRESH_MODELS if (entry.file, kind(entry)) not in NOT_FOUND]


def test_there_are_thirty_and_they_can_be_mended() -> None:
    assert len(MISTAKES) == 39
    assert sum("mended" in one for one in MISTAKES) == 38


@pytest.mark.parametrize("name", sorted({one["file"] for one in MISTAKES}))
def test_files_run_with_their_mistakes_and_without(name: str) -> None:
    source = (FRESH / name).read_text()
    needs_what_it_imports(source)
    load(source, name)
    for mistake in MISTAKES:
        for old, new in mistake.get("mended", []) if mistake["file"] == name else ():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
    load(source, name)


def test_the_static_half_finds() -> None:
    by_neither = {(name, line) for name, line, _ in missed(FRESH, MISTAKES)}
    assert len(MISTAKES) - len(by_neither) >= FOUND_BY_READING
    by_neither -= {(entry.file, entry.lines[0]) for entry in FOUND}
    assert len(MISTAKES) - len(by_neither) >= FOUND_BY_EITHER


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: f"{entry.file}:{entry.lines[0]}")
def test_the_running_half_finds_and_finds_it_mended(entry: PlantedModel) -> None:
    needs_what_it_imports((FRESH / entry.file).read_text())
    (line,) = entry.lines
    assert named(entry, line, examined(entry, line, (line,)))
    assert not named(entry, line, examined(entry, line, ()))
