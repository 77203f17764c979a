"""Each setting of config.json, changed: it is refused, or changes our logits as it changes those of transformers."""

import json
from typing import Any

import pytest
import torch

from regard.errors import RegardError
from regard.models import LanguageModel

from .conftest import VOCABULARY

NAMED = {"architectures", "dtype", "model_type", "transformers_version"}
"""Settings that say which model it is."""


def changed(value: Any) -> list[Any]:
    """Other values of the same kind, and none."""
    match value:
        case bool():
            return [not value, None]
        case int():
            return [value + 1, max(value - 1, 0), None]
        case float():
            return [value * 1.5 + 0.1, None]
        case str():
            return [f"{value}x", "gelu"]
        case list():
            return [value[::-1], value[:-1], None]
        case dict():
            linear = {"rope_type": "linear", "factor": 3.0}
            return [{**value, "rope_theta": 50.0}, {**value, "factor": 2.0}, {**value, **linear}, None]
        case _:
            return [1, True]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2, best groups",
        "deepseek_v3, yarn",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa, shared choices",
        "kimi_linear",
        "gpt_oss",
        "qwen3_moe",
    ],
)
@torch.no_grad()
def test_no_changed_setting_is_read_in_silence(name, checkpoint):
    transformers = pytest.importorskip("transformers")
    model, folder = checkpoint(name)
    path, tokens = folder / "config.json", torch.randint(3, VOCABULARY, (1, 17))
    settings, expected = json.loads(path.read_text()), model(tokens).logits
    refused: set[str] = set()
    for setting in sorted(settings.keys() - NAMED):
        for value in changed(settings[setting]):
            path.write_text(json.dumps(settings | {setting: value}))
            try:
                ours = LanguageModel.from_huggingface(folder)(tokens)
            except RegardError:
                refused.add(setting)
                continue
            try:
                theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
                wanted = theirs(tokens).logits
            except Exception:  # it accepts no such value, so that it says nothing
                wanted = expected
            torch.testing.assert_close(
                ours, wanted, atol=1e-5, rtol=1e-5, msg=lambda text, told=(setting, value): f"{told}: {text}"
            )
    assert {"hidden_size", "num_attention_heads", "vocab_size"} <= refused
