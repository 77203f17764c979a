"""PyTorch (BSD-3-Clause): literal results of its Transformer layers, test/cpp/api/transformer.cpp.

Post-norm, d = 4, 2 heads, 16 inside, no dropout, and every parameter cos(0, 1, 2, ...) in its shape; length first.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.nn import MultiheadAttention, swap

Numbers = list[list[list[float]]]

SOURCE = [
    [[0.7462, 0.6653, 0.5679, 0.4891], [0.5387, 0.1655, 0.3565, 0.0471]],
    [[0.8335, 0.2799, 0.5031, 0.2947], [0.1402, 0.0318, 0.7636, 0.1346]],
    [[0.6333, 0.9344, 0.1376, 0.9938], [0.8924, 0.2872, 0.6692, 0.2944]],
    [[0.9897, 0.6915, 0.3154, 0.1733], [0.8645, 0.3513, 0.3064, 0.0767]],
    [[0.8117, 0.2366, 0.4838, 0.7881], [0.3718, 0.4945, 0.9511, 0.0864]],
]
TARGET = [
    [[0.4517, 0.6793, 0.5313, 0.0034], [0.2678, 0.3677, 0.4459, 0.7166]],
    [[0.8100, 0.3716, 0.4096, 0.1976], [0.6958, 0.8844, 0.6081, 0.8315]],
    [[0.0494, 0.9343, 0.5955, 0.3830], [0.5404, 0.3464, 0.9378, 0.6200]],
]
ENCODED = [
    [[2.428589, 0.020835, -0.602055, -0.085249], [2.427987, 0.021213, -0.602496, -0.084103]],
    [[2.424689, 0.019155, -0.604793, -0.085672], [2.413863, 0.022211, -0.612486, -0.072490]],
    [[2.433774, 0.021598, -0.598343, -0.087548], [2.425104, 0.019748, -0.604515, -0.084839]],
    [[2.436185, 0.022682, -0.596625, -0.087261], [2.433556, 0.021891, -0.598509, -0.086832]],
    [[2.416246, 0.017512, -0.610712, -0.082961], [2.422901, 0.024187, -0.606178, -0.074929]],
]
ENCODED_PADDED = [
    [[2.429026, 0.020793, -0.601741, -0.085642], [2.428811, 0.021445, -0.601912, -0.084252]],
    [[2.425009, 0.019155, -0.604566, -0.085899], [2.415408, 0.02249, -0.611415, -0.073]],
    [[2.434199, 0.021682, -0.598039, -0.087699], [2.42598, 0.019941, -0.603896, -0.085091]],
    [[2.436457, 0.022736, -0.59643, -0.08736], [2.434021, 0.022093, -0.598179, -0.08679]],
    [[2.416531, 0.017498, -0.610513, -0.083181], [2.4242, 0.024653, -0.605266, -0.074959]],
]
ENCODED_GELU = [
    [[2.42163188, 0.03227153, -0.60714219, -0.05908082], [2.42151276, 0.03302179, -0.60722523, -0.05762651]],
    [[2.41926761, 0.02974034, -0.60879519, -0.0621269], [2.41626395, 0.03539356, -0.61087842, -0.04978623]],
    [[2.42382808, 0.03218872, -0.6055963, -0.06073591], [2.41983477, 0.03085259, -0.60840145, -0.06046414]],
    [[2.42500749, 0.03328855, -0.60476388, -0.0595334], [2.4237977, 0.03290575, -0.60561789, -0.05940082]],
    [[2.41383916, 0.02686345, -0.61256377, -0.06380707], [2.42000277, 0.03800944, -0.60824798, -0.04754947]],
]
TWO_LAYERS = [
    [[2.419051, 0.017446, -0.608738, -0.085003], [2.419102, 0.017452, -0.608703, -0.085026]],
    [[2.419043, 0.017445, -0.608744, -0.084999], [2.419052, 0.017446, -0.608738, -0.085004]],
    [[2.419067, 0.017448, -0.608727, -0.085010], [2.419098, 0.017452, -0.608706, -0.085024]],
    [[2.419072, 0.017449, -0.608724, -0.085012], [2.419119, 0.017455, -0.608691, -0.085034]],
    [[2.419019, 0.017442, -0.608761, -0.084989], [2.419075, 0.017449, -0.608722, -0.085014]],
]
SIX_LAYERS = [[[2.419101, 0.017453, -0.608703, -0.085025], [2.419101, 0.017453, -0.608704, -0.085025]]] * 5
TWO_LAYERS_NORMED = [
    [[1.695949, -0.357635, -0.893077, -0.445238], [1.695955, -0.357639, -0.893050, -0.445266]],
    [[1.695948, -0.357634, -0.893082, -0.445233], [1.695950, -0.357635, -0.893077, -0.445238]],
    [[1.695951, -0.357636, -0.893069, -0.445246], [1.695955, -0.357639, -0.893052, -0.445264]],
    [[1.695952, -0.357636, -0.893066, -0.445249], [1.695957, -0.357641, -0.893041, -0.445276]],
    [[1.695946, -0.357632, -0.893095, -0.445220], [1.695952, -0.357637, -0.893065, -0.445251]],
]
DECODED = [
    [[2.430065, 0.027862, -0.601136, -0.073096], [2.431935, 0.028907, -0.599809, -0.072488]],
    [[2.428457, 0.027053, -0.602275, -0.073462], [2.431970, 0.029387, -0.599789, -0.071621]],
    [[2.431934, 0.028196, -0.599802, -0.073809], [2.432306, 0.028858, -0.599542, -0.072846]],
]
DECODED_TARGET_PADDED = [
    [[2.430025, 0.027643, -0.601164, -0.073476], [2.4323, 0.029375, -0.599553, -0.071881]],
    [[2.428523, 0.026838, -0.602226, -0.07391], [2.432634, 0.029842, -0.599318, -0.071253]],
    [[2.432278, 0.028152, -0.599555, -0.074139], [2.432659, 0.029244, -0.599294, -0.072382]],
]
DECODED_MEMORY_PADDED = [
    [[2.429757, 0.027358, -0.601351, -0.073816], [2.432692, 0.028583, -0.599263, -0.073634]],
    [[2.428247, 0.02662, -0.602419, -0.074123], [2.432657, 0.029055, -0.599293, -0.072732]],
    [[2.431515, 0.027687, -0.600096, -0.074459], [2.433075, 0.028543, -0.598987, -0.073985]],
]
DECODED_GELU = [
    [[2.42049104, 0.03443088, -0.60793706, -0.05436271], [2.42210631, 0.03546578, -0.60679895, -0.05357488]],
    [[2.41907674, 0.0336104, -0.60892977, -0.05490462], [2.42216881, 0.03586554, -0.6067524, -0.05289126]],
    [[2.42205716, 0.03488046, -0.60683681, -0.05460596], [2.42240309, 0.0354595, -0.60659063, -0.05378816]],
]
SOURCE_PADDING = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 1, 1]]) > 0
TARGET_PADDING = torch.tensor([[0, 0, 1], [0, 1, 1]]) > 0
MEMORY_PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]) > 0


def cosines(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.cos(torch.arange(0.0, parameter.numel())).view(parameter.shape))


def layer(kind: type[nn.Module], *, batch_first: bool = False, activation: str = "relu") -> Any:
    """A layer of torch's with regard's attention in it."""
    model = kind(4, 2, 16, dropout=0.0, batch_first=batch_first, activation=activation)
    cosines(model)
    assert all(isinstance(model.get_submodule(name), MultiheadAttention) for name in swap(model).replaced)
    return model


def close(actual: Tensor, expected: Numbers) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=1e-7)


@pytest.fixture(params=["training", "evaluation"])
def mode(request) -> Any:
    """In evaluation torch's own layers take another path, which swap has to close."""
    if request.param == "training":
        return lambda model: model.train()
    return lambda model: model.eval().requires_grad_(False)


@pytest.mark.parametrize("batch_first", [False, True])
class TestEncoderLayer:
    @pytest.mark.parametrize(
        ("source", "padding", "expected"),
        [
            ([[[20, 30, 40, 50]]], None, [[[2.258703, 0.127985, -0.697881, 0.170862]]]),
            ([[[20, 30, 40, 50]]], [[0]], [[[2.258703, 0.127985, -0.697881, 0.170862]]]),
            ([[[1, 2, 3, 4]], [[5, 6, 7, 8]]], None, [[[2.272644, 0.119035, -0.691669, 0.153486]]] * 2),
            ([[[1, 2, 3, 4]], [[5, 6, 7, 8]]], [[0, 0]], [[[2.272644, 0.119035, -0.691669, 0.153486]]] * 2),
            ([[[1, 2, 3, 4]], [[5, 6, 7, 8]]], [[1, 0]], [[[2.301516, 0.092249, -0.679101, 0.103088]]] * 2),
            (SOURCE, None, ENCODED),
            (SOURCE, [[0] * 5] * 2, ENCODED),
            (SOURCE, SOURCE_PADDING.tolist(), ENCODED_PADDED),
        ],
    )
    def test_relu(self, mode, batch_first, source, padding, expected):
        self.check(mode, batch_first, source, padding, expected)

    @pytest.mark.parametrize(
        ("source", "expected"),
        [([[[20, 30, 40, 50]]], [[[2.249815, 0.131006, -0.702199, 0.177868]]]), (SOURCE, ENCODED_GELU)],
    )
    def test_gelu(self, mode, batch_first, source, expected):
        self.check(mode, batch_first, source, None, expected, activation="gelu")

    def test_nothing_but_padding(self, mode, batch_first):
        """NaN in older releases of torch, and still in evaluation with the batch first; here the row adds a bias."""
        model = mode(layer(nn.TransformerEncoderLayer, batch_first=batch_first))
        source = torch.tensor([[[20.0, 30.0, 40.0, 50.0]]])
        output = model(source, src_key_padding_mask=torch.tensor([[True]]))
        inner = model.norm1(source + model.self_attn.out_proj.bias)
        torch.testing.assert_close(output, model.norm2(inner + model.linear2(model.linear1(inner).relu())))
        assert output.isfinite().all()

    def check(self, mode, batch_first, source, padding, expected, **options):
        model = mode(layer(nn.TransformerEncoderLayer, batch_first=batch_first, **options))
        x = torch.tensor(source, dtype=torch.float32)
        padded = None if padding is None else torch.tensor(padding) > 0
        output = model(x.transpose(0, 1) if batch_first else x, src_key_padding_mask=padded)
        close(output.transpose(0, 1) if batch_first else output, expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("layers", "normed", "padded", "expected"),
    [
        (1, False, False, ENCODED),
        (1, False, True, ENCODED_PADDED),
        (2, False, True, TWO_LAYERS),
        (6, False, True, SIX_LAYERS),
        (2, True, True, TWO_LAYERS_NORMED),
    ],
)
def test_encoder(mode, batch_first, layers, normed, padded, expected):
    inner = nn.TransformerEncoderLayer(4, 2, 16, dropout=0.0, batch_first=batch_first)
    cosines(inner)
    model = nn.TransformerEncoder(inner, layers, nn.LayerNorm(4) if normed else None, enable_nested_tensor=batch_first)
    assert len(swap(model).replaced) == layers
    mode(model)
    x = torch.tensor(SOURCE)
    output = model(x.transpose(0, 1) if batch_first else x, src_key_padding_mask=SOURCE_PADDING if padded else None)
    close(output.transpose(0, 1) if batch_first else output, expected)


@pytest.mark.parametrize("batch_first", [False, True])
class TestDecoderLayer:
    @pytest.mark.parametrize(
        ("target", "memory", "masks", "expected"),
        [
            ([[[20, 30, 40, 50]]], [[[60, 70, 80, 90]]], {}, [[[2.314351, 0.094805, -0.671322, 0.101977]]]),
            (
                [[[9, 10, 11, 12]], [[11, 12, 13, 14]]],
                [[[1, 2, 3, 4]]],
                {},
                [[[2.422245, 0.051716, -0.606338, -0.024756]]] * 2,
            ),
            (
                [[[1, 2, 3, 4]], [[5, 6, 7, 8]]],
                [[[9, 10, 11, 12]], [[11, 12, 13, 14]]],
                {},
                [[[2.343536, 0.085561, -0.654954, 0.074991]]] * 2,
            ),
            (TARGET, SOURCE, {}, DECODED),
            (TARGET, SOURCE, {"tgt_key_padding_mask": TARGET_PADDING & False}, DECODED),
            (TARGET, SOURCE, {"tgt_key_padding_mask": TARGET_PADDING}, DECODED_TARGET_PADDED),
            (TARGET, SOURCE, {"memory_key_padding_mask": MEMORY_PADDING & False}, DECODED),
            (TARGET, SOURCE, {"memory_key_padding_mask": MEMORY_PADDING}, DECODED_MEMORY_PADDED),
        ],
    )
    def test_relu(self, mode, batch_first, target, memory, masks, expected):
        self.check(mode, batch_first, target, memory, masks, expected)

    @pytest.mark.parametrize(
        ("target", "memory", "expected"),
        [
            ([[[20, 30, 40, 50]]], [[[60, 70, 80, 90]]], [[[2.306435, 0.095946, -0.675796, 0.10687]]]),
            (
                [[[9, 10, 11, 12]], [[11, 12, 13, 14]]],
                [[[1, 2, 3, 4]]],
                [[[2.415448, 0.054389, -0.610932, -0.0156613]]] * 2,
            ),
            (
                [[[1, 2, 3, 4]], [[5, 6, 7, 8]]],
                [[[9, 10, 11, 12]], [[11, 12, 13, 14]]],
                [[[2.338531, 0.087709, -0.65776, 0.080646]]] * 2,
            ),
            (TARGET, SOURCE, DECODED_GELU),
        ],
    )
    def test_gelu(self, mode, batch_first, target, memory, expected):
        self.check(mode, batch_first, target, memory, {}, expected, activation="gelu")

    def check(self, mode, batch_first, target, memory, masks, expected, **options):
        model = mode(layer(nn.TransformerDecoderLayer, batch_first=batch_first, **options))
        given = [torch.tensor(numbers, dtype=torch.float32) for numbers in (target, memory)]
        output = model(*(x.transpose(0, 1) if batch_first else x for x in given), **masks)
        close(output.transpose(0, 1) if batch_first else output, expected)
