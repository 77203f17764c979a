"""Whole models give with attn_implementation="regard" what they give with "eager": outputs, weights, gradients."""

import pytest
import torch

from regard.masks import causal

DECODERS = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3", "llama4", "deepseek_v3")
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
ENCODERS = ("bert", "modernbert")
TRANSLATORS = ("t5", "t5gemma", "bart", "marian", "whisper")
ALL = DECODERS + ENCODERS + TRANSLATORS

LEFT = torch.tensor([[1] * 13, [0] * 4 + [1] * 9])
RIGHT = torch.tensor([[1] * 13, [1] * 8 + [0] * 5])


@pytest.mark.parametrize("name", ALL)
def test_the_output_is_eagers(pair, ask, close, exactly, name):
    eager, ours = pair(name)
    for _ in range(3):
        inputs = ask(name)
        with torch.no_grad():
            exact = exactly(eager, **inputs)
            close(ours(**inputs), exact)
            close(eager(**inputs), exact)  # what the other tests compare with


@pytest.mark.parametrize("name", ALL)
def test_the_weights_are_eagers(pair, ask, close, exactly, name):
    eager, ours = pair(name)
    inputs = ask(name)
    with torch.no_grad():
        exact = exactly(eager, **inputs, output_attentions=True)
        theirs, mine = eager(**inputs, output_attentions=True), ours(**inputs, output_attentions=True)
    kinds = (
        ["attentions"] if name not in TRANSLATORS else ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    )
    for kind in kinds:
        assert len(mine[kind]) == len(theirs[kind]) == 2
        for weights, eagers, expected in zip(mine[kind], theirs[kind], exact[kind], strict=True):
            assert weights.shape == expected.shape
            close(weights, expected)
            close(eagers, expected)


@pytest.mark.parametrize("name", ALL)
def test_no_weights_unless_asked(pair, ask, name):
    outputs = pair(name)[1](**ask(name))
    assert not any("attentions" in kind for kind in outputs)


@pytest.mark.parametrize("padding", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("name", DECODERS + ENCODERS)
def test_padding(pair, ask, close, name, padding):
    eager, ours = pair(name)
    inputs = ask(name)
    with torch.no_grad():
        mine, theirs = (model(**inputs, attention_mask=padding, output_attentions=True) for model in (ours, eager))
        unpadded = eager(**inputs)
    close(mine, theirs, padding)
    assert (unpadded[0] - theirs[0])[1].abs().max() > 1e-3  # the padding is not without effect
    for weights, expected in zip(mine.attentions, theirs.attentions, strict=True):
        close(weights.transpose(1, 2), expected.transpose(1, 2), padding)


@pytest.mark.parametrize("name", ["t5", "t5gemma", "bart", "marian"])
def test_padding_of_source_and_target(pair, ask, close, name):
    eager, ours = pair(name)
    source = torch.tensor([[1] * 11, [1] * 6 + [0] * 5])
    with torch.no_grad():
        inputs = ask(name) | {"attention_mask": source, "decoder_attention_mask": RIGHT}
        close(ours(**inputs), eager(**inputs), RIGHT)


@pytest.mark.parametrize("name", ALL)
def test_gradients_in_training(pair, ask, name):
    eager, ours = pair(name)
    inputs = ask(name)
    if name not in ENCODERS:
        inputs["attention_mask" if name in DECODERS else "decoder_attention_mask"] = RIGHT
    towards = None
    for model in (eager, ours):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for attribute in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
        model.train()
        outputs = model(**inputs)
        output = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        towards = (
            torch.randn_like(output) * (RIGHT[..., None] if name not in ENCODERS else 1) if towards is None else towards
        )
        (output * towards).sum().backward()
    mine = dict(ours.named_parameters())
    # Taken together, for that of a key's bias is nothing but rounding: such a bias has no effect. Eager's own, in
    # float32, are up to 4e-6 of the largest away from those in float64.
    largest = max(tensor.grad.abs().max() for tensor in eager.parameters() if tensor.grad is not None)
    for parameter, tensor in eager.named_parameters():
        if tensor.grad is None:
            assert mine[parameter].grad is None
            continue
        torch.testing.assert_close(
            mine[parameter].grad / largest, tensor.grad / largest, rtol=1e-4, atol=1e-5, msg=parameter
        )


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(pair, close, name):
    eager, ours = pair(name)
    tokens = torch.randint(3, 60, (1, 17))
    positions = torch.tensor([[*range(7), *range(4), *range(6)]])
    with torch.no_grad():
        packed = ours(tokens, position_ids=positions, use_cache=False)
        close(packed, eager(tokens, position_ids=positions, use_cache=False))
        alone = [eager(part, use_cache=False).logits for part in tokens.split([7, 4, 6], 1)]
    if name != "gpt_oss":  # transformers' own does not tell its mask function the positions
        close(packed.logits, torch.cat(alone, 1))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_with_padding_in_a_batch(pair, close, name):
    eager, ours = pair(name)
    tokens = torch.randint(3, 60, (2, 12))
    # The second row ends in padding, which is a document of its own.
    positions = torch.tensor([[*range(5), *range(7)], [*range(6), *range(3), *range(3)]])
    with torch.no_grad():
        packed = ours(tokens, position_ids=positions, use_cache=False)
        close(packed, eager(tokens, position_ids=positions, use_cache=False))
        close(packed.logits[1:, 6:9], eager(tokens[1:, 6:9]).logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_flash_attns_description_of_packed_sequences_is_followed(pair, close, name):
    eager, ours = pair(name)
    tokens = torch.randint(3, 60, (1, 11))
    ends = torch.tensor([0, 7, 11], dtype=torch.int32)
    with torch.no_grad():
        packed = ours(
            tokens,
            position_ids=torch.tensor([[*range(7), *range(4)]]),
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=7,
            max_length_k=7,
        )
        alone = [eager(part).logits for part in tokens.split([7, 4], 1)]
    close(packed.logits, torch.cat(alone, 1))


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_has_effect(pair, ask, name):
    inputs, ours = ask(name), pair(name)[1]
    wide = pair(name, sliding_window=6)[1]
    with torch.no_grad():
        assert (ours(**inputs).logits - wide(**inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_come_in_the_models_dtype(pair, ask, dtype):
    eager, ours = pair("llama")
    inputs = ask("llama")
    with torch.no_grad():
        weights = ours.to(dtype)(**inputs, output_attentions=True).attentions[0]
        expected = eager.to(dtype)(**inputs, output_attentions=True).attentions[0]
    assert weights.dtype == dtype
    torch.testing.assert_close(weights, expected, rtol=2e-2, atol=2e-2)


def test_weights_have_a_gradient(pair, ask, close):
    grads, inputs = [], ask("llama")
    for model in pair("llama"):
        model(**inputs, output_attentions=True).attentions[1].square().sum().backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    close(grads[1], grads[0])


def test_dropout_is_applied_in_training_alone(pair, ask, close):
    eager, ours = pair("llama", attention_dropout=0.5)
    inputs = ask("llama")
    with torch.no_grad():
        close(ours(**inputs), eager(**inputs))
        ours.train()
        one, other = ours(**inputs, output_attentions=True), ours(**inputs)
        assert (one.logits - other.logits).abs().max() > 1e-2
        # The first layer reads the same input as without dropout: its weights are those before it.
        torch.testing.assert_close(one.attentions[0], eager(**inputs, output_attentions=True).attentions[0])


def test_masks_of_four_axes_are_followed(pair, ask, close):
    eager, ours = pair("llama")
    inputs = ask("llama")
    keep = causal().dense(13, 13) & (torch.rand(2, 1, 13, 13) < 0.7) | torch.eye(13, dtype=torch.bool)
    added = torch.zeros(2, 1, 13, 13).masked_fill(~keep, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = eager(**inputs, attention_mask=added)
        close(ours(**inputs, attention_mask=added), expected)
        close(ours(**inputs, attention_mask=keep), expected)


def test_a_decoder_made_an_encoder(pair, ask, close):
    eager, ours = pair("llama", is_causal=False)
    inputs = ask("llama")
    with torch.no_grad():
        close(ours(**inputs), eager(**inputs))
        assert (ours(**inputs).logits - pair("llama")[1](**inputs).logits).abs().max() > 1e-3


def test_inference_mode(pair, ask, close):
    eager, ours = pair("gemma3")
    inputs = ask("gemma3")
    with torch.inference_mode():
        close(ours(**inputs), eager(**inputs))


def test_gradient_checkpointing(pair, ask, close):
    eager, ours = pair("mistral")
    inputs = ask("mistral")
    ours.activation_checkpointing_enable()
    for model in (eager, ours):
        model.train()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    close(*(model.model.layers[0].self_attn.k_proj.weight.grad for model in (ours, eager)))


def test_with_padding_on_the_left_one_label_is_predicted_from_padding(pair, ask):
    eager, ours = pair("llama")
    inputs = ask("llama") | {"attention_mask": LEFT}
    labels = inputs["input_ids"].masked_fill(LEFT == 0, -100)
    with torch.no_grad():
        mine, theirs = (model(**inputs, labels=labels).loss for model in (ours, eager))
        eager.set_attn_implementation("sdpa")
        torch.testing.assert_close(mine, eager(**inputs, labels=labels).loss)
        assert (mine - theirs).abs() > 1e-3
        eager.set_attn_implementation("eager")
        labels[1, 4] = -100  # the first token
        torch.testing.assert_close(ours(**inputs, labels=labels).loss, eager(**inputs, labels=labels).loss)


@pytest.mark.parametrize("name", ["granite_swa", "granitemoe_swa"])
def test_granites_weights_are_those_that_multiply_the_values(pair, ask, close, name):
    eager, ours = pair(name)
    inputs = ask(name)
    with torch.no_grad():
        mine, theirs = (model(**inputs, output_attentions=True) for model in (ours, eager))
    close(mine, theirs)
    for weights, expected in zip(mine.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(expected.sum(-1), torch.ones(2, 4, 13))
        assert (weights.sum(-1) < 0.99).any()
        close(weights / weights.sum(-1, keepdim=True), expected)


@pytest.mark.slow
def test_compiled(pair, ask, close):
    eager, ours = pair("gemma3")
    inputs = ask("gemma3") | {"attention_mask": LEFT}
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        close(compiled(**inputs, use_cache=False), eager(**inputs), LEFT)
