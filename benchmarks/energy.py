# SPDX-License-Identifier: Apache-2.0
"""Power, energy and clock of the largest kernels in loops, and of whole decodes: what a card at its power limit pays.

    python benchmarks/energy.py [--seconds 1.0] [--out benchmarks/results]

A card that draws its limit lowers its clock until it does not: then the time of a decode is its energy divided by the
limit, and a kernel is made faster by fewer products, bytes and instructions alone, not by filling its gaps. Energy is
the driver's counter (NVML), read before and after a loop that was warmed up. Beside the kernels stand a large matmul of
random numbers and of zeros, which differ in nothing but the bits that change, and a large copy. Writes JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import decode
import decode_weights
import ops
import torch

from wan22_vae_decode import Decoder, layers, winograd
from wan22_vae_decode.backends.cuda.backend import CudaBackend

# Level, frames, rows, columns, channels, as in ops.py.
CONVS = ((1, 8, 88, 156, 1024), (2, 8, 176, 312, 512), (3, 8, 352, 624, 256))
LEAST_CALLS = 4
"""Of a loop, however long a call takes."""


@dataclass
class Row:
    """One loop. ``joules`` and ``ms`` are of one call; ``mhz`` is the median clock; ``flops`` and ``nbytes`` of a call
    are 0 where they say nothing.
    """

    name: str
    ms: float
    joules: float
    watts: float
    mhz: float
    flops: float = 0.0
    nbytes: float = 0.0


class Meter:
    """NVML's energy counter and clock of one GPU, by the library that comes with the driver."""

    _SM_CLOCK = 1

    def __init__(self, device: torch.device) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._check(self._nvml.nvmlInit_v2())
        # NVML counts all GPUs, torch those in CUDA_VISIBLE_DEVICES; the identifier is the same.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)))

    def joules(self) -> float:
        """Since the driver was loaded."""
        value = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)))
        return value.value / 1e3

    def limit_watts(self) -> float:
        value = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle, ctypes.byref(value)))
        return value.value / 1e3

    @contextmanager
    def clocks(self) -> Iterator[list[int]]:
        """The multiprocessors' clock in MHz, every 10 ms."""
        seen: list[int] = []
        done = threading.Event()

        def sample() -> None:
            value = ctypes.c_uint()
            while not done.wait(0.01):
                self._check(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._SM_CLOCK, ctypes.byref(value)))
                seen.append(value.value)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NVML gave status {status}")


class Bench:
    """Loops on one GPU, printed as they end."""

    def __init__(self, meter: Meter, seconds: float) -> None:
        self.meter = meter
        self.seconds = seconds
        self.rows: list[Row] = []

    def row(self, name: str, run: Callable[[], object], flops: float = 0.0, nbytes: float = 0.0) -> None:
        """Runs for a third of the time to warm the card up, then for ``seconds``."""
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        calls = max(LEAST_CALLS, round(self.seconds / (time.perf_counter() - begin)))
        for _ in range(-(-calls // 3)):
            run()
        torch.cuda.synchronize()
        with self.meter.clocks() as clocks:
            joules, begin = self.meter.joules(), time.perf_counter()
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
            joules, took = self.meter.joules() - joules, time.perf_counter() - begin
        mhz = statistics.median(clocks) if clocks else 0.0
        row = Row(name, 1e3 * took / calls, joules / calls, joules / took, mhz, flops, nbytes)
        self.rows.append(row)
        print(f"{name:<40} {row.ms:9.3f} ms {row.joules:9.3f} J {row.watts:5.0f} W {mhz:5.0f} MHz", flush=True)


def time_references(bench: Bench, device: torch.device) -> None:
    """What arithmetic and bytes cost by themselves."""
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    bench.row("matmul 8192^3", lambda: torch.mm(a, b, out=out), flops=2 * 8192.0**3)
    zeros = torch.zeros_like(a)
    bench.row("matmul 8192^3 of zeros", lambda: torch.mm(zeros, zeros, out=out), flops=2 * 8192.0**3)
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    bench.row("copy of 2 GiB", lambda: target.copy_(source), nbytes=8.0 * source.numel())


def time_conv(bench: Bench, backend: CudaBackend, level: int, t: int, rows: int, cols: int, c: int) -> None:
    """The three kernels of the first band of a Winograd conv with a residual."""
    form = backend.winograd_form(level, c, c, split_rows=False)
    assert form is not None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=backend.dtype, device=backend.device)

    weight = winograd.prepare_weight(random(c, 3, 3, 3, c) * (27 * c) ** -0.5, form.columns, backend.dtype)
    conv = layers.WinogradConv(weight, torch.randn(c, device=backend.device), form)
    x, history, skip = random(t, rows, cols, c), random(2, rows, cols, c), random(1, t, rows, cols, c)
    norm = torch.ones(c, device=backend.device)
    for part, run in ops.winograd_parts(backend, level, x, norm, history, conv, skip, torch.empty_like(x)):
        bench.row(f"{part.op} {part.shape}", run, part.flops, part.nbytes)


def time_decode(bench: Bench, backend: CudaBackend) -> None:
    """Whole decodes of 121 frames at 704x1248."""
    vae = decode_weights.random_vae(decode_weights.SETS[0], backend.device)
    decoder = Decoder.from_state_dict(vae.state_dict(), device=backend.device, dtype="float16", backend=backend)
    del vae
    latents = torch.randn(1, 48, 31, 44, 78, device=backend.device)
    bench.row("decode of 121 frames", lambda: decoder.decode(latents))


def main() -> int:
    """Measures everything; 2 where the kernels cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a loop (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    backend = decode.float16_kernels()
    if backend is None:
        return 2
    try:
        meter = Meter(backend.device)
    except (OSError, RuntimeError) as error:
        print(f"The driver's energy counter cannot be read: {error}", file=sys.stderr)
        return 2
    bench = Bench(meter, arguments.seconds)
    with torch.no_grad():
        time_references(bench, backend.device)
        for conv in CONVS:
            time_conv(bench, backend, *conv)
        time_decode(bench, backend)
    rows = [asdict(row) for row in bench.rows]
    decode.write_report(arguments.out / "energy.json", limit_watts=meter.limit_watts(), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
