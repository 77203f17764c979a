"""OpenAI's own client against a running server: texts, streams, stop words, log probabilities, chat and attention."""

import json

import pytest
import torch

from regard.lenses import Entropy, TopK
from regard.models.language_model import LanguageModel, Sampling
from regard.serving import ServedModel

openai = pytest.importorskip("openai")
PROMPT = "Schöne Grüße"


@pytest.fixture
def client(bytes_server):
    with openai.OpenAI(base_url=f"{bytes_server.address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def alone(model, prompt, count, sampling=None, seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tokens = model.generate(torch.tensor([list(prompt.encode())]), count, sampling=sampling, generator=generator)
    return bytes(int(token) for token in tokens).decode("utf-8", "replace")


def test_a_text_is_continued_as_by_the_model(client, language_model):
    answer = client.completions.create(model="bytes", prompt=PROMPT, max_tokens=30, temperature=0)
    assert answer.choices[0].text == alone(language_model, PROMPT, 30)
    assert answer.choices[0].finish_reason == "length"
    size = len(PROMPT.encode())
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        size,
        30,
        size + 30,
    )
    assert client.models.list().data[0].id == "bytes"


def test_tokens_and_several_texts_are_prompts_too(client, language_model):
    expected = [alone(language_model, text, 9) for text in (PROMPT, "Hi")]
    answer = client.completions.create(model="bytes", prompt=[PROMPT, "Hi"], max_tokens=9, temperature=0)
    assert [choice.text for choice in answer.choices] == expected
    answer = client.completions.create(model="bytes", prompt=[72, 105], max_tokens=9, temperature=0)
    assert [choice.text for choice in answer.choices] == expected[1:]


def test_seeds_draw_what_the_model_draws(client, language_model):
    answer = client.completions.create(
        model="bytes", prompt=PROMPT, max_tokens=20, temperature=0.7, top_p=0.9, n=3, seed=5, extra_body={"top_k": 20}
    )
    sampling = Sampling(0.7, 20, 0.9)
    assert [choice.text for choice in answer.choices] == [
        alone(language_model, PROMPT, 20, sampling, seed) for seed in (5, 6, 7)
    ]


def test_a_stream_is_the_whole_in_parts(client, language_model):
    parts = list(
        client.completions.create(
            model="bytes",
            prompt=PROMPT,
            max_tokens=25,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == alone(language_model, PROMPT, 25)
    assert [part.choices[0].finish_reason for part in parts[-3:-1]] == [None, "length"]
    assert parts[-1].usage.completion_tokens == 25
    assert len(parts) == 26


@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_end_a_text_and_are_not_in_it(client, language_model, stream, bytes_server, eventually):
    text = alone(language_model, PROMPT, 60)
    word = text[20:23]
    cut = text[: text.index(word)]
    answer = client.completions.create(
        model="bytes", prompt=PROMPT, max_tokens=60, temperature=0, stop=[word, "Q!"], stream=stream
    )
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == cut
    assert choices[-1].finish_reason == "stop"
    batch = bytes_server.state.worker.batch
    eventually(lambda: batch.is_empty and batch.paged.memory.pool.free == 200)


def test_log_probabilities_are_those_of_the_model(client, language_model):
    answer = client.completions.create(model="bytes", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    told, prompt = answer.choices[0].logprobs, list(PROMPT.encode())
    text = answer.choices[0].text
    assert "".join(told.tokens) == text
    assert [
        text[begin:][: len(token)] for begin, token in zip(told.text_offset, told.tokens, strict=True)
    ] == told.tokens
    with torch.no_grad():
        chances = language_model(torch.tensor([prompt + list(text.encode())]))[0].log_softmax(-1)
    for number, token in enumerate(text.encode()):
        row = chances[len(prompt) - 1 + number]
        assert told.token_logprobs[number] == pytest.approx(float(row[token]), abs=1e-4)
        top = row.topk(3)
        expected = {chr(key): value for key, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)}
        assert told.top_logprobs[number] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_attention_of_each_token_is_that_of_the_model(client, language_model, stream):
    answer = client.completions.create(
        model="bytes",
        prompt="Hallo du",
        max_tokens=4,
        temperature=0,
        stream=stream,
        extra_body={"attention": {"top": 3, "layers": [1]}},
    )
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    text, told = "".join(choice.text for choice in choices), [one for each in choices for one in each.attention]
    lenses, tokens = (TopK(3), Entropy()), list(b"Hallo du" + text.encode())
    with torch.no_grad():
        seen = language_model.observe(torch.tensor([tokens]), *lenses)
    assert [each["token"] for each in told] == list(text)
    for row, each in enumerate(told, 7):
        (layer,) = each["layers"]
        assert layer["layer"] == 1
        assert layer["entropy"] == pytest.approx(seen[lenses[1]][1][0, :, row].tolist(), abs=1e-4)
        for head, pairs in enumerate(layer["top"]):
            top = seen[lenses[0]][1]
            assert [column for column, _ in pairs] == top.columns[0, head, row].tolist()
            assert [weight for _, weight in pairs] == pytest.approx(top.weights[0, head, row].tolist(), abs=1e-4)


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A model of transformers with a tokenizer of words and a chat template."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder, words = tmp_path_factory.mktemp("chat"), ["[UNK]", "<s>", "</s>", "<user>", "<assistant>", "<system>"]
    words += [f"w{number}" for number in range(40)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"<\w+>|w\d+"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
    )
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    return folder


def test_chat_by_the_template_of_a_folder(chat_folder, serve):
    model = LanguageModel.from_huggingface(chat_folder)
    with (
        serve(ServedModel.load(chat_folder, name="small")) as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = [
            {"role": "system", "content": "w1w2"},
            {"role": "user", "content": [{"type": "text", "text": "w3"}]},
        ]
        answer = client.chat.completions.create(
            model="small", messages=messages, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2
        )
        prompt = [5, 7, 8, 3, 9, 4]  # <system>w1w2<user>w3<assistant>
        tokens = [int(token) for token in model.generate(torch.tensor([prompt]), 6, stop=2)]
        words = [f"w{token - 6}" for token in tokens if token > 5]
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.choices[0].message.content == "".join(words) or min(tokens) < 6
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        parts = client.chat.completions.create(
            model="small", messages=messages, max_completion_tokens=6, temperature=0, stream=True
        )
        assert "".join(part.choices[0].delta.content for part in parts) == answer.choices[0].message.content


REFUSED = {
    "another model": ({"model": "gpt"}, openai.NotFoundError, "there is no model 'gpt' here, but 'bytes'"),
    "hot": ({"temperature": 3}, openai.BadRequestError, "temperature: Input should be less than or equal to 2"),
    "penalty": (
        {"presence_penalty": 1},
        openai.BadRequestError,
        "presence_penalty: Input should be less than or equal",
    ),
    "unknown": ({"extra_body": {"beams": 3}}, openai.BadRequestError, "beams: it is not known here"),
    "layer": (
        {"extra_body": {"attention": {"layers": [2]}}},
        openai.BadRequestError,
        "no layer 2: the model has 2, 0..1",
    ),
    "empty": ({"prompt": ""}, openai.BadRequestError, "the text has no tokens"),
    "token": ({"prompt": [300]}, openai.BadRequestError, "the text has 300; it needs one token at least"),
    "long": ({"max_tokens": 5000}, openai.APIStatusError, "5,000 new tokens are asked for; 4,096 are made at most"),
    "memory": ({"prompt": "a" * 20_000}, openai.APIStatusError, "pages of 64, but the memory has 200"),
    "too long": ({"prompt": "a" * 40_000}, openai.APIStatusError, "40,000 tokens; 32,768 are taken at most"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(client, name, stream):
    change, kind, message = REFUSED[name]
    request = {"model": "bytes", "prompt": "a", "max_tokens": 3, "stream": stream} | change
    with pytest.raises(kind, match=message) as raised:
        client.completions.create(**request)
    assert raised.value.status_code == {"memory": 413, "long": 413, "too long": 413}.get(
        name, 404 if name == "another model" else 400
    )


def test_a_model_of_bytes_has_no_chat(client):
    with pytest.raises(openai.BadRequestError, match="has no chat template: ask for /v1/completions"):
        client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": "hi"}])
