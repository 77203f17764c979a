"""A head that is taught links of words: it learns them, the translations stay, and folders of each kind are written."""

import pytest
import torch
from marian_folders import SENTENCES, write_folder

from regard.errors import CheckpointError, ConfigurationError, CorpusError
from regard.heads import alignment_error_rate
from regard.models.decoded_target import SourceHead
from regard.models.transformer.pretrained_tensors import open_translator
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.taught_head import Teaching, linked_text, taught_model, write_taught
from regard.translation.translator import Translator
from regard.translation.word_aligner import align_words

PAIRS = [
    ("I am tired.", "Je suis fatigué."),
    ("You are late.", "Tu es en retard."),
    ("My dog is old.", "Mon chien est vieux."),
    ("The house is old.", "La maison est vieille."),
    ("I sold my old car.", "J'ai vendu ma vieille voiture."),
    ("My brother has a red car.", "Mon frère a une voiture rouge."),
]


def error_rate(translator, links, layer=None, head=None):
    pairs = translator.align(*zip(*PAIRS, strict=True), layer=layer, head=head)
    return alignment_error_rate([pair.links for pair in pairs], links, links)


@pytest.fixture(scope="module")
def links():
    return [set(some) for some in align_words(*([line.split() for line in side] for side in zip(*PAIRS, strict=True)))]


@pytest.fixture(scope="module")
def taught(links):
    translator = Translator.load(ENGLISH_FRENCH)
    before = {name: tensor.clone() for name, tensor in taught_model(translator.model).state_dict().items()}
    errors = [error_rate(translator, links, 1, 3)]
    english, french = zip(*PAIRS, strict=True)
    choice = translator.teach_alignment(english, french, links, SourceHead(1, 3), Teaching(updates=25))
    return translator, before, choice, [*errors, error_rate(translator, links)]


def test_the_head_learns_the_links_and_the_translations_stay(taught, links):
    translator, _, choice, (before, after) = taught
    assert (choice.layer, choice.head, choice.step, choice.pairs) == (1, 3, "says", 6)
    assert after < before / 2
    assert after == error_rate(translator, links, 1, 3)
    lines = ["I am very tired.", "My brother sold his house.", "Where is the station?"]
    plain = Translator.load(ENGLISH_FRENCH).translate(lines, observe=False)
    assert [one.text for one in translator.translate(lines, observe=False)] == [one.text for one in plain]


def test_queries_and_keys_of_one_layer_change_and_no_more(taught):
    translator, before, _, _ = taught
    after = taught_model(translator.model).state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    start = "decoder.blocks.1.cross_attention.projections"
    names = {f"{start}.{kind}.{part}" for kind in ("query", "key") for part in ("weight", "bias")}
    assert changed == names & before.keys()
    assert all(parameter.requires_grad and parameter.grad is None for parameter in translator.model.parameters())


def test_it_is_written_beside_what_it_came_from(taught, tmp_path):
    translator, _, choice, _ = taught
    folder = tmp_path / "taught"
    write_taught(ENGLISH_FRENCH, "best", folder, taught_model(translator.model), choice.layer)
    choice.save(folder)
    loaded = Translator.load(folder)
    assert loaded.alignment == choice
    assert loaded.trust is None
    assert loaded.longest_trained == Translator.load(ENGLISH_FRENCH).longest_trained
    [one], [other] = (model.align(["I am tired."], ["Je suis fatigué."]) for model in (loaded, translator))
    assert torch.equal(one.weights, other.weights)
    with pytest.raises(CheckpointError, match="is not empty, and what it holds would be mixed up: name another folder"):
        write_taught(ENGLISH_FRENCH, "best", folder, taught_model(translator.model), 1)


def test_a_folder_of_transformers_is_taught_and_loaded_by_transformers(tmp_path):
    from transformers import MarianMTModel

    write_folder(tmp_path / "opus")
    translator = Translator.from_huggingface(tmp_path / "opus")
    words = [set(zip(range(9), range(9), strict=True)) for _ in SENTENCES]
    choice = translator.teach_alignment(SENTENCES, SENTENCES, words, teaching=Teaching(updates=4, batch_size=5))
    assert (choice.layer, choice.head) == (0, 0)  # the last layer but one
    write_taught(tmp_path / "opus", "best", tmp_path / "taught", taught_model(translator.model), 0)
    loaded = Translator.from_huggingface(tmp_path / "taught")
    for name, tensor in taught_model(loaded.model).state_dict().items():
        assert torch.equal(tensor, taught_model(translator.model).state_dict()[name]), name
    before, after = (open_translator(tmp_path / folder) for folder in ("opus", "taught"))
    changed = {name for name in before if not torch.equal(before[name].read(), after[name].read())}
    parts = [f"{kind}_proj.{part}" for kind in "qk" for part in ("weight", "bias")]
    assert changed == {f"model.decoder.layers.0.encoder_attn.{part}" for part in parts}
    theirs = MarianMTModel.from_pretrained(tmp_path / "taught").eval()
    source, target = (torch.tensor([translator.source_vocabulary.encode(SENTENCES[0])]) for _ in range(2))
    with torch.no_grad():
        expected = theirs(input_ids=source, decoder_input_ids=target).logits
        found = taught_model(loaded.model)(source, torch.tensor([source.shape[1]]), target)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_links_of_words_become_links_of_tokens():
    words = [([0, 0, 1, -1], [0, 1, 1]), ([0], [0]), ([0, 1], [0])]
    text = linked_text([[9, 8, 7, 2], [5], [4, 3]], [[6, 5, 4], [3], [2]], words, [{(0, 1), (1, 0)}, set(), {(1, 0)}])
    assert [text.sources[row].tolist() for row in range(2)] == [[9, 8, 7, 2], [4, 3]]
    assert text.links is not None
    assert text.links[0].tolist() == [0, 2, 1, 0, 1, 1, 2, 0, 2, 1]
    assert text.links[1].tolist() == [0, 1]


def test_what_cannot_be_taught_is_named(taught, links):
    translator, _, _, _ = taught
    english, french = zip(*PAIRS, strict=True)
    with pytest.raises(
        CorpusError, match="none of the 6 pairs has a link between its words: there is nothing to teach"
    ):
        translator.teach_alignment(english, french, [set()] * 6)
    with pytest.raises(CorpusError, match="there are 6 pairs and links of 5: each pair needs its own"):
        translator.teach_alignment(english, french, links[:5])
    with pytest.raises(ConfigurationError, match="there is no head 9: the decoder has 6, 0 to 5"):
        translator.teach_alignment(english, french, links, SourceHead(0, 9))
    with pytest.raises(ConfigurationError, match="Linear is no Transformer, and has no head that could be taught"):
        taught_model(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="updates is 0; it needs to be above 0"):
        Teaching(updates=0)
