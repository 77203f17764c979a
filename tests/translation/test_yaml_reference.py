from pathlib import Path

import pytest

from regard.translation.config_errors import sections_of
from regard.translation.experiment import Experiment, field_docstrings, translation_reference

PAGE = Path(__file__).parents[2] / "docs" / "yaml.md"


def sections(section):
    yield section
    for field in section.model_fields.values():
        for inner in sections_of(field.annotation):
            yield from sections(inner)


def test_the_page_is_what_the_settings_say():
    assert PAGE.read_text(encoding="utf-8") == translation_reference(), (
        "docs/yaml.md is out of date: python -m regard.translation.experiment > docs/yaml.md"
    )


@pytest.mark.parametrize("section", dict.fromkeys(sections(Experiment)))
def test_every_key_has_a_meaning_and_every_section_a_heading(section):
    assert field_docstrings(section).keys() >= section.model_fields.keys()
    assert all(len(meaning) > 5 for meaning in field_docstrings(section).values())


def test_defaults_and_types_are_as_the_settings_have_them():
    page = translation_reference()
    assert "| `learning_rate` | number, > 0 | `0.001` |" in page
    assert "| `betas` | list of number, ≥ 0, < 1 | `[0.9, 0.999]` |" in page
    assert "| `norm` | `post` or `pre` | `post` |" in page
    assert "| `max_updates` | integer, ≥ 1 or null | `null` |" in page
    assert "## `model.decoder.score` of kind `additive` or `concat`" in page
