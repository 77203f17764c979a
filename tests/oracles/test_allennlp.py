"""AllenNLP (Apache-2.0): the tests of its attention modules, raw scores."""

import torch

from regard import scores


def test_additive():
    score = scores.Additive(query_dim=2, key_dim=3, hidden_dim=2)
    with torch.no_grad():  # AllenNLP multiplies from the left: its matrices are the transposes
        score.query_weight.copy_(torch.tensor([[-0.2, 0.3], [-0.5, 0.5]]).T)
        score.key_weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, -1.0]]).T)
        score.weight.copy_(torch.tensor([1.0, -1.0]))
    query = torch.tensor([[0.7, -0.8], [0.4, 0.9]])
    key = torch.tensor(
        [
            [[1.0, -1.0, 3.0], [0.5, -0.3, 0.0], [0.2, -1.0, 1.0], [0.7, 0.8, -1.0]],
            [[-2.0, 3.0, -3.0], [0.6, 0.2, 2.0], [0.5, -0.4, -1.0], [0.2, 0.2, 0.0]],
        ]
    )
    expected = torch.tensor(
        [[1.975072, -0.04997836, 1.2176098, -0.9205586], [-1.4851665, 1.489604, -1.890285, -1.0672251]]
    )
    values = score.pairs(query.unsqueeze(1), key).scores().squeeze(1)
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-6)


def test_bilinear_is_general_and_an_offset():
    score = scores.General(query_dim=2, key_dim=2)
    with torch.no_grad():
        score.weight.copy_(torch.tensor([[-0.3, 0.5], [2.0, -1.0]]))
    values = score.pairs(torch.ones(1, 2), torch.eye(2)).scores() + 0.1
    torch.testing.assert_close(values, torch.tensor([[1.8, -0.4]]))


def test_dot_and_scaled_dot():
    query = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    key = torch.tensor([[7.0, 8.0, 9.0], [10.0, 11.0, 12.0]])
    assert scores.Dot().pairs(query, key).scores().tolist() == [[0.0, 0.0], [24.0, 33.0]]
    scaled = scores.ScaledDot(9**-0.5).pairs(query, key).scores()  # AllenNLP divides by the root of its factor 9
    torch.testing.assert_close(scaled, torch.tensor([[0.0, 0.0], [8.0, 11.0]]))
