"""Pages of findings in Chromium; the tests are those of explorer/test/findings.browser.ts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from explorer_npm import needs_browser, run_npm
from torch import nn

from regard.doctor import diagnose, diagnosis_page, examination_page, examine

WRONG = "def f(q, k, v):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v\n"
CORRECT = "def f(q, k, v):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v\n"
HOSTILE = (
    "# </script><script>window.harmed=1</script><!-- <img src=x onerror=window.harmed=1>\n"
    "# \u202ereversed\u200b \x1b[31m \"quoted' &lt; &amp;\n" + WRONG.replace("@ v", "@ v  # " + "long " * 200)
)


class Leaky(nn.Module):
    """An encoder layer, taken for a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)


def write_pages(folder: Path) -> None:
    texts = {
        "src/wrong.py": WRONG,
        "src/inner/also.py": WRONG + WRONG.replace("f(", "g("),
        "src/inner/correct.py": CORRECT,
    }
    found = [one for path, text in texts.items() for one in diagnose(text, path=path)]
    diagnosis_page(found, sources=texts).save(folder / "code.html")
    name = 'src/<b>"a"\u202e.py'
    diagnosis_page(diagnose(HOSTILE, path=name), sources={name: HOSTILE}).save(folder / "hostile.html")
    many = {f"src/part_{number % 20}/module_{number}.py": WRONG for number in range(3000)}
    (one,) = diagnose(WRONG)
    diagnosis_page([replace(one, path=path) for path in many], sources=many).save(folder / "many.html")
    torch.manual_seed(0)
    examination = examine(Leaky(), torch.randn(2, 20, 8), causal=True, maps=True)
    assert {"RUN101", "RUN106"} <= examination.codes
    examination_page(examination).save(folder / "model.html")


@needs_browser
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_chromium(tmp_path):
    write_pages(tmp_path)
    assert "skipped 0" in run_npm("browser", "--", "findings", FINDINGS=str(tmp_path))
