# SPDX-License-Identifier: Apache-2.0
"""The order in which a stream's passes are computed, copied and waited for, told by a stand-in for CUDA."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from wan22_vae_decode import OutOfMemoryError, host

CUDA = SimpleNamespace(type="cuda")


class Pixels:
    """A pass's pixels, or their copy, that write down what happens to them."""

    shape, dtype, device = (1, 3, 4, 16, 16), torch.uint8, CUDA

    def __init__(self, name, said):
        self.name, self.said = name, said

    def copy_(self, other, non_blocking):
        assert non_blocking
        self.name = other.name
        self.said.append(f"copy {other.name}")

    def record_stream(self, stream):
        self.said.append(f"{self.name} is used by {stream.name}")


@pytest.fixture
def said(monkeypatch):
    lines = []

    class Stream:
        def __init__(self, device=None, name="side"):
            self.name = name

        def wait_stream(self, other):
            lines.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self, stream):
            self.name = lines[-1]

        def synchronize(self):
            lines.append(f"host waits for {self.name}")

    cuda = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        current_stream=lambda device: Stream(name="current"),
        stream=lambda stream: contextlib.nullcontext(),
    )

    def empty(shape, dtype, pin_memory):
        assert pin_memory
        return Pixels("target", lines)

    monkeypatch.setattr(host, "torch", SimpleNamespace(cuda=cuda, empty=empty))
    return lines


def passes(count, said):
    for number in range(count):
        pixels = Pixels(number, said)
        target = host.target(pixels)
        said.append(f"compute {number}")
        yield pixels, target


def test_copy_runs_beside_the_next_pass(said):
    def begun(number):
        return [f"compute {number}", "side waits for current", f"copy {number}", f"{number} is used by side"]

    items = host.on_host(passes(3, said), CUDA)
    assert next(items).name == 0
    assert said == [*begun(0), *begun(1), "host waits for copy 0"]
    said.clear()
    assert next(items).name == 1
    assert said == [*begun(2), "host waits for copy 1"]
    said.clear()
    assert next(items).name == 2
    assert said == ["host waits for copy 2"]
    assert next(items, None) is None


@pytest.mark.parametrize("count", [0, 1])
def test_short_streams_end(count, said):
    assert [item.name for item in host.on_host(passes(count, said), CUDA)] == list(range(count))


def test_items_on_a_cpu_are_as_they_are():
    items = [torch.zeros(1), torch.ones(1)]
    passes = ((item, host.target(item)) for item in items)
    assert list(map(id, host.on_host(passes, torch.device("cpu")))) == list(map(id, items))


def test_lack_of_pinned_memory_is_an_error_that_says_so(said, monkeypatch):
    def empty(shape, dtype, pin_memory):
        raise RuntimeError(
            "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions"
        )

    monkeypatch.setattr(host.torch, "empty", empty)
    sentence = (
        r"^4 frames of pixels do not fit into pinned host memory \(CUDA error: out of memory\); free memory of the"
    )
    with pytest.raises(OutOfMemoryError, match=sentence):
        host.target(Pixels(0, said))
