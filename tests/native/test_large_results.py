"""Memory of large results: used again where nothing has it any more, else new, in huge pages where enough are free."""

import mmap
import threading

import pytest
import torch

from regard import native
from regard.backends.cpu.cpu_backend import CPU
from regard.core import large_results
from regard.core.large_results import new_large, new_large_like
from regard.core.recurrence_problem import RecurrenceProblem

PAGE = 2**21
BLOCKS = """Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal   3763   2259   3062   1115    810   1634   2142   1231    483      5      2
"""


LIKE = torch.zeros(1)
SHAPE = 2, 2**20


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """No storages of the tests before."""
    monkeypatch.setattr(large_results, "_kept", large_results._Kept())
    return large_results._kept


def filled(number: float, *shape: int) -> torch.Tensor:
    return new_large(LIKE, *(shape or SHAPE)).fill_(number)


counted = pytest.mark.skipif(not large_results._counts_references(), reason="torch counts storages in another way")


def test_this_torch_counts_references():
    assert large_results._counts_references()


@counted
@pytest.mark.parametrize("shape", [SHAPE, (2**20, 2), (1, 2**21)])
def test_memory_of_a_result_that_is_gone_is_that_of_the_next(shape):
    made = filled(1.0)
    address = made.data_ptr()
    del made
    again = new_large(LIKE, *shape)
    assert again.data_ptr() == address
    assert again.shape == shape
    assert again.is_contiguous()
    assert again._base is None
    assert again.is_leaf


@pytest.mark.parametrize("length", [3, 2**20])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_a_result_like_a_tensor_has_its_strides(length, order):
    tensor = torch.zeros(2, length, 2).permute(order)
    made = new_large_like(tensor)
    assert made.shape == tensor.shape
    assert made.stride() == tensor.stride()
    assert made.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("batch", [2, 2**14])
def test_a_result_like_overlapping_rows_is_contiguous(batch):
    windows = torch.zeros(batch, 33).unfold(-1, 29, 1)
    assert torch.empty_like(windows).stride(-1) != 1
    assert new_large_like(windows).stride() == (5 * 29, 29, 1)


@counted
def test_released_memory_is_not_kept():
    made, gone = filled(1.0), filled(2.0)
    address = gone.data_ptr()
    assert large_results._kept.storages
    del gone
    native.release_memory()
    assert not large_results._kept.storages
    assert (made == 1.0).all()  # what is in use stays as it is
    assert address != made.data_ptr()


HOLDERS = {
    "the result": lambda made: made,
    "a view": lambda made: made[1, ::2],
    "a detached tensor": lambda made: made.detach(),
    "an array": lambda made: made.numpy(),
    "a buffer": lambda made: memoryview(made.numpy()),
    "a storage": lambda made: made.untyped_storage(),
    "a capsule": lambda made: made.__dlpack__(),
    "a tensor of a capsule": lambda made: torch.from_dlpack(made),
    "a tensor of an array": lambda made: torch.from_numpy(made.numpy()),
    "a graph": lambda made: made.mul(torch.ones((), requires_grad=True)),
    "a lazy clone": lambda made: torch._lazy_clone(made),  # type: ignore[attr-defined]
}


@counted
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_something_has_is_not_used(holder):
    made = filled(1.0)
    address, held = made.data_ptr(), HOLDERS[holder](made)
    del made
    others = [filled(2.0) for _ in range(2)]
    assert held is not None
    assert all(other.data_ptr() != address for other in others)
    assert others[0].data_ptr() != others[1].data_ptr()


@counted
def test_the_saved_result_of_a_graph_keeps_its_numbers():
    factor = torch.full((), 3.0, requires_grad=True)
    product = filled(2.0) * factor
    filled(100.0)
    product.sum().backward()
    assert factor.grad == 2.0 * product.numel()


@counted
@pytest.mark.parametrize("shape", [(4, 2**20), (2, 2**19), (0,)])
def test_results_may_be_resized(shape):
    made = filled(1.0)
    made.resize_(shape)
    made.fill_(3.0)
    filled(4.0)
    filled(5.0, 4, 2**20)
    assert made.shape == shape
    assert bool((made == 3.0).all())


@counted
def test_a_storage_that_was_freed_and_made_anew_is_not_used():
    made = filled(1.0)
    made.untyped_storage().resize_(0)
    made.untyped_storage().resize_(made.numel() * 4)
    made.fill_(3.0)
    filled(4.0)
    assert bool((made == 3.0).all())


@counted
def test_memory_that_other_processes_share_is_not_used():
    made = filled(1.0).share_memory_()
    address = made.data_ptr()
    del made
    assert new_large(LIKE, *SHAPE).data_ptr() != address


@counted
def test_other_sizes_and_dtypes_have_other_memory():
    made = filled(1.0)
    address = made.data_ptr()
    del made
    others = [new_large(LIKE, 3, 2**20), new_large(torch.zeros(1, dtype=torch.int32), *SHAPE)]
    assert [other.dtype for other in others] == [torch.float32, torch.int32]
    assert address not in [other.data_ptr() for other in others]


@counted
def test_no_more_is_kept_than_the_limit(monkeypatch, kept):
    monkeypatch.setattr(large_results, "KEPT_BYTES", 3 * 2**23)
    made = [filled(number) for number in range(5)]
    assert [bool((one == number).all()) for number, one in enumerate(made)] == [True] * 5
    assert [each.memory for each in kept.storages] == [one.data_ptr() for one in made[2:]]
    filled(6.0, 5, 2**20)
    assert sum(each.owner.nbytes for each in kept.storages) <= 3 * 2**23


@counted
def test_storages_are_used_in_inference_mode_and_outside():
    with torch.inference_mode():
        made = filled(1.0)
        address = made.data_ptr()
        assert made.is_inference()
        del made
    again = filled(2.0)
    assert again.data_ptr() == address
    assert not again.is_inference()


@counted
def test_threads_never_have_the_same_memory():
    wrong, start = [], threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for _ in range(20):
            made = filled(number)
            if not bool((made == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_results_are_new_where_references_are_not_counted(monkeypatch, kept):
    monkeypatch.setattr(large_results, "_counts_references", lambda: False)
    assert filled(1.0).shape == SHAPE
    assert kept.storages == []


def test_small_results_are_not_kept(kept):
    new_large(LIKE, 2, 2**19)
    assert kept.storages == []


@pytest.fixture
def requests(monkeypatch, tmp_path):
    """What is asked of the system, with 2-MiB pages of which 1 + 2 * 3 + 5 + 2 * 2 = 16 are free."""
    asked = []
    (tmp_path / "buddyinfo").write_text(BLOCKS, "utf-8")
    monkeypatch.setattr(large_results, "FREE_BLOCKS", tmp_path / "buddyinfo")
    monkeypatch.setattr(large_results, "_page_size", lambda: PAGE)
    monkeypatch.setattr(large_results, "_advise", lambda: lambda *arguments: asked.append(arguments))
    return asked


def test_free_blocks_are_counted_in_huge_pages(requests, monkeypatch, tmp_path):
    if mmap.PAGESIZE == 4096:
        assert large_results._free_pages(PAGE) == 16
    for content in ("", "no zones\n", "Node 0, zone Normal x y\n"):
        (tmp_path / "buddyinfo").write_text(content, "utf-8")
        assert large_results._free_pages(PAGE) == 0
    monkeypatch.setattr(large_results, "FREE_BLOCKS", tmp_path / "missing")
    assert large_results._free_pages(PAGE) == 0


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="the blocks above are counted for pages of 4 KiB")
@pytest.mark.parametrize(("pages", "expected"), [(7, True), (15, False)])
def test_pages_are_asked_for_where_twice_as_many_are_free(requests, monkeypatch, pages, expected):
    monkeypatch.setattr(large_results, "LARGE_BYTES", 2**20)
    made = new_large(torch.zeros(1), pages + 1, PAGE // 4)
    assert bool(requests) == expected
    for begin, size, advice in requests:
        assert begin % PAGE == size % PAGE == 0
        assert made.data_ptr() <= begin < begin + size <= made.data_ptr() + made.nbytes
        assert advice == mmap.MADV_HUGEPAGE


def test_small_results_and_systems_without_huge_pages_ask_for_none(requests, monkeypatch):
    new_large(torch.zeros(1), 2, PAGE // 4)
    monkeypatch.setattr(large_results, "LARGE_BYTES", 2**20)
    monkeypatch.setattr(large_results, "_page_size", lambda: 0)
    new_large(torch.zeros(1), 3, PAGE // 4)
    monkeypatch.setattr(large_results, "_advise", lambda: None)
    new_large(torch.zeros(1), 3, PAGE // 4)
    assert requests == []


@pytest.mark.skipif(not native.available(), reason="there is no native code")
def test_results_are_the_same_in_huge_pages(monkeypatch):
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 2, 20_000, 64).unbind()
    problem = RecurrenceProblem(*inputs, feature_map="elu", normalize=True)
    expected = CPU.recurrences.forward(problem)
    monkeypatch.setattr(large_results, "LARGE_BYTES", 2**20)
    monkeypatch.setattr(large_results, "FREE_SHARE", 0)
    found = CPU.recurrences.forward(problem)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.state, expected.state)
