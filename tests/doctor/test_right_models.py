"""`regard.doctor.examine` on right models of many architectures: no error is reported, and the page has the table."""

from pathlib import Path

import pytest
from right_models import RIGHT_MODELS, RightModel, warned

from regard.doctor import Severity

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "doctor-evaluation.md"


@pytest.mark.parametrize("model", RIGHT_MODELS, ids=lambda model: model.name)
def test_a_right_model_has_no_error(model: RightModel) -> None:
    found = model.examined()
    assert [str(one) for one in found.findings if one.severity is Severity.ERROR] == []
    assert len(found.checked) >= 10
    assert f"| {model.name} | {len(found.checked)} | 0 | {warned(found)} |" in PAGE.read_text("utf-8")
