"""Memory of linear attention: linear in the length, forward and backward, far below n · d² and n²."""

import subprocess

import pytest

PROGRAM = """
import resource, sys, torch, regard
torch.set_num_threads(1)
length, axes, delta = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def step(length):
    q, k, v = (torch.randn(1, 2, length, 64).requires_grad_() for _ in range(3))
    options = dict(causal=True, normalize=not delta)
    if axes:
        options["decay"] = (-torch.rand((1, 2, length, 64)[:axes])).requires_grad_()
    if delta:
        options["beta"] = torch.rand(1, 2, length).requires_grad_()
        k = torch.nn.functional.normalize(k, dim=-1)
    regard.linear_attention(q, k, v, **options).sum().backward()
step(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(length)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def peak(python: list[str], length: int, axes: int, delta: bool) -> int:
    """Bytes that a training step of 2 heads of 64 adds to the largest resident set of a new process."""
    arguments = [*python, "-c", PROGRAM, str(length), str(axes), str(int(delta))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(("axes", "delta"), [(0, False), (4, True)])
def test_a_training_step_stays_far_below_a_state_for_each_position(warm_python, axes, delta):
    length = 32_768
    assert peak(warm_python, length, axes, delta) < 4 * 2 * length * 64 * 64 / 2
