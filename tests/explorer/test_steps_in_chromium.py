"""The live page of steps in Chromium, served and as one file; the tests are those of explorer/test/steps.browser.ts."""

import threading

import pytest
from explorer_npm import needs_browser, run_npm

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from regard.explorer.steps_page import steps_page
from regard.explorer.steps_server import StepsServer
from regard.steps.live_steps import LiveSteps, StepRequest


@needs_browser
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_chromium(tmp_path):
    live = LiveSteps()
    steps_page(live, StepRequest("dot", "나는 학생이다", word=4), "ko").save(tmp_path / "steps.html")
    serving = StepsServer(live)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        printed = run_npm("browser", "--", "steps", STEPS=serving.address, STEPS_FILE=str(tmp_path / "steps.html"))
    finally:
        serving.stop()
        thread.join(30)
    assert "skipped 0" in printed
