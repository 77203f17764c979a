"""Folders, and what kind of model is served from them."""

import json

import pytest

from regard.errors import CheckpointError, ConfigurationError
from regard.models.language_model import (
    AttentionConfig,
    FeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    LayerConfig,
)
from regard.serving import ServedModel
from regard.serving.text_codec import ByteCodec, TokenizerCodec
from regard.translation.run_folder import ENGLISH_FRENCH


def saved(folder, vocabulary=256):
    layers = (LayerConfig(),)
    LanguageModel(LanguageModelConfig(vocabulary, 8, layers, AttentionConfig(2), FeedForwardConfig(16))).save(folder)


def test_a_model_of_bytes_alone_or_of_a_run(tmp_path):
    saved(tmp_path / "alone")
    saved(tmp_path / "run" / "model")
    for folder in ("alone", "run"):
        served = ServedModel.load(tmp_path / folder)
        assert served.name == folder
        assert isinstance(served.codec, ByteCodec)
        assert served.translator is None


def test_a_translator(tmp_path):
    served = ServedModel.load(ENGLISH_FRENCH, name="en-fr")
    assert served.name == "en-fr"
    assert served.translator is not None
    assert served.language_model is None


def test_tokens_that_are_no_bytes(tmp_path):
    saved(tmp_path, vocabulary=50)
    with pytest.raises(ConfigurationError, match=r"has 50 tokens, which are no bytes, and no tokenizer\.json"):
        ServedModel.load(tmp_path)


def test_damaged_tokenizers(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json: the text of tokens is not known"):
        TokenizerCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TokenizerCodec(tmp_path)


def test_chat_templates(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigurationError, match="has no chat template"):
        TokenizerCodec(tmp_path).chat(messages)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    )
    assert TokenizerCodec(tmp_path).chat(messages) == "<s>[hi]"
    for template in ("{{ raise_exception('no system') }}", "{{ messages.__class__.__mro__ }}", "{% for %}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match="the chat template of the model refuses the messages"):
            TokenizerCodec(tmp_path).chat(messages)
