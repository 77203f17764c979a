import torch

from regard.native import memory


def test_it_is_memory_like_any_other():
    for sizes in ((3, 5), (0,), (memory.LEAST // 4 + 7,)):
        tensor = memory.empty(*sizes).fill_(3.0)
        assert tensor.shape == sizes
        assert (tensor == 3).all()
    assert memory.empty(2, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_large_pages_are_asked_for_within_the_tensor_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "_advise", lambda: lambda *arguments: asked.append(arguments))
    memory.empty(memory.LEAST // 4 - 1)
    assert asked == []
    tensor = memory.empty(memory.LEAST // 4 + 5)
    ((first, length, _),) = asked
    assert first % memory.LARGE_PAGE == length % memory.LARGE_PAGE == 0
    assert tensor.data_ptr() <= first
    assert first + length <= tensor.data_ptr() + tensor.nbytes


def test_other_systems(monkeypatch):
    monkeypatch.setattr(memory, "_advise", lambda: None)
    assert memory.empty(memory.LEAST).shape == (memory.LEAST,)
