"""Rotary positions along several axes: against transformers' Qwen2-VL and Qwen3-VL, and by their laws."""

from typing import Any

import pytest
import torch

import regard
from regard.errors import ConfigurationError, ShapeError
from regard.models.language_model.config import CONFIG_JSON
from regard.positions import Axial, InterleavedSections, LinearScaling, Rotary, Sections


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


NUMBERS: Any = (4, 4)
SMALL = [Sections((1, 3, 4)), InterleavedSections((4, 2, 2)), Axial(2)]
places = torch.randint(0, 30, (3, 2, 37), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_multimodal_positions_are_those_of_transformers(kind):
    sizes = [16, 24, 24] if kind == "qwen2_vl" else [24, 20, 20]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sizes}
    settings: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 4, "rope_parameters": rope}
    if kind == "qwen2_vl":
        names, sections = ("Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig"), Sections(tuple(sizes))
    else:
        names, sections = ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig"), InterleavedSections(tuple(sizes))
        settings["head_dim"] = 128
    module = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    embedding, config = (getattr(module, name) for name in names)
    query, key = drawn(2, 4, 37, 128), drawn(2, 2, 37, 128, seed=1)
    theirs = module.apply_rotary_pos_emb(query, key, *embedding(config(**settings))(query, places))
    rotation = Rotary(128, base=1e6, sections=sections).rotation(tuple(places))
    for mine, expected in zip((rotation.rotate(query), rotation.rotate(key)), theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sections", SMALL)
def test_each_pair_turns_by_the_position_of_its_axis(sections):
    tensor, at = drawn(5, 16, dtype=torch.float64), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])
    at = at[: sections.axes]
    turned = Rotary(16, base=100.0, sections=sections).rotate(tensor, tuple(at))
    count = 8 // sections.axes if isinstance(sections, Axial) else 8
    for pair, axis in enumerate(sections.axis_of_pairs(8)):
        angle = at[axis] * 100.0 ** (-(pair % count) / count)
        x, y = tensor[:, pair], tensor[:, pair + 8]
        torch.testing.assert_close(turned[:, pair], x * angle.cos() - y * angle.sin())
        torch.testing.assert_close(turned[:, pair + 8], x * angle.sin() + y * angle.cos())


@pytest.mark.parametrize("sections", SMALL)
def test_products_depend_on_the_differences_along_each_axis(sections):
    rotary = Rotary(16, sections=sections)
    query, key = drawn(7, 16, dtype=torch.float64), drawn(7, 16, seed=2, dtype=torch.float64)
    at = list(places[: sections.axes, 0, :7])
    moved = [each + 11 * (axis + 1) for axis, each in enumerate(at)]
    products = [rotary.rotate(query, where) @ rotary.rotate(key, where).mT for where in (at, moved)]
    torch.testing.assert_close(*products)


@pytest.mark.parametrize("sections", SMALL[:2])
def test_text_has_the_same_position_on_all_axes(sections):
    tensor, at = drawn(2, 4, 37, 16), torch.arange(37)
    plain = Rotary(16).rotate(tensor, at)
    for where in (at, (at,) * 3, (at.expand(2, 37),) * 3):
        assert torch.equal(Rotary(16, sections=sections).rotate(tensor, where), plain)


def test_a_picture_of_rows_and_columns_is_two_rotary_embeddings():
    rows, columns = torch.arange(3).repeat_interleave(4), torch.arange(4).repeat(3)
    tensor = drawn(12, 8)
    turned = Rotary(8, layout="interleaved", sections=Axial(2)).rotate(tensor, (rows, columns))
    by_part = [
        Rotary(4, layout="interleaved").rotate(*each) for each in ((tensor[:, :4], rows), (tensor[:, 4:], columns))
    ]
    torch.testing.assert_close(turned, torch.cat(by_part, -1))


def test_a_layer_takes_the_rotation_of_a_call():
    rotary = Rotary(8, sections=Sections((1, 1, 2)))
    layer = regard.nn.Attention(regard.nn.Projections(32, num_heads=4), mask=regard.masks.causal(), rotary=rotary)
    x, at = drawn(2, 37, 32), tuple(places)
    found = layer(x, rotation=rotary.rotation(at))
    queries = layer.projections.queries(x)
    keys, values = layer.projections.keys_and_values(x)
    output = regard.attention(rotary.rotate(queries, at), rotary.rotate(keys, at), values, mask=regard.masks.causal())
    torch.testing.assert_close(found, layer.projections.project_output(output))
    assert not torch.allclose(found, layer(x), atol=1e-3)


@pytest.mark.parametrize("sections", SMALL)
def test_a_configuration_holds_sections(sections):
    rotary = Rotary(16, sections=sections)
    assert CONFIG_JSON.decode(CONFIG_JSON.encode(rotary)) == rotary


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(16, sections=NUMBERS), "needs sections of regard.positions"),
        (lambda: Rotary(16, sections=Sections((4, 5))), "is of 9 pairs of features, but Rotary turns 8"),
        (lambda: Sections((4, 0)), "a number of pairs for each axis"),
        (lambda: Rotary(16, sections=InterleavedSections((1, 7))), "needs more pairs of an axis after the first"),
        (lambda: Rotary(6, sections=Axial(2)), "needs a dim of Rotary that 4 divides; it is 6"),
        (lambda: Axial(0), "a number of axes from 1 on"),
        (lambda: Rotary(16, scaling=LinearScaling(2.0), sections=Axial(2)), "leave scaling out, or use Sections"),
    ],
)
def test_sections_that_do_not_fit_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        (Rotary(16), "got the positions of 2 axes; it needs one tensor, as it has no sections"),
        (Rotary(16, sections=Sections((1, 3, 4))), "got the positions of 2 axes; it needs those of 3"),
    ],
)
def test_positions_of_other_axes_are_named(rotary, message):
    with pytest.raises(ShapeError, match=message):
        rotary.rotation((torch.arange(3), torch.arange(3)))
