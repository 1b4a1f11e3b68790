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
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import decode
import decode_weights
import torch

from wan22_vae_decode import Decoder, backends, winograd
from wan22_vae_decode.backends.cuda import heuristics
from wan22_vae_decode.backends.cuda.backend import CudaBackend

# Level, frames, rows, columns, C_in, C_out, as in ops.py.
CONVS = ((1, 8, 88, 156, 1024, 1024), (2, 8, 176, 312, 512, 512), (3, 8, 352, 624, 256, 256))
DECODES = 4
"""Timed decodes of 121 frames."""


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

    def row(
        self, name: str, run: Callable[[], object], flops: float = 0.0, nbytes: float = 0.0, calls: int = 0
    ) -> None:
        """Runs for a third of the time to warm the card up, then for ``seconds``, or ``calls`` times."""
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        calls = calls or max(2, round(self.seconds / (time.perf_counter() - begin)))
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


def time_conv(bench: Bench, ops: CudaBackend, level: int, t: int, rows: int, cols: int, c_in: int, c_out: int) -> None:
    """The three kernels of a Winograd conv's first band."""
    columns = ops.winograd_columns(level, c_in, c_out, split_rows=False)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=ops.dtype, device=ops.device)

    x, history = random(t, rows, cols, c_in), random(2, rows, cols, c_in)
    residual = random(t, rows, cols, c_out)
    weight = winograd.prepare_weight(random(c_out, 3, 3, 3, c_in) * (27 * c_in) ** -0.5, columns, ops.dtype)
    gain, bias = torch.ones(c_in, device=ops.device), torch.randn(c_out, device=ops.device)
    count, (down, across) = len(weight), winograd.tiles(rows, cols, columns)
    tile_row = heuristics.tile_row_bytes(columns, cols, t, c_in, c_out, x.element_size())
    band = heuristics.tile_rows_per_band(down, t, tile_row)
    tiles, size = band * across, x.element_size()
    components = x.new_empty(count, t + 2, band, across, c_in)
    products = x.new_empty(count, t, band, across, c_out)
    windows = components.as_strided((count, t * tiles, 3, c_in), (components.stride(0), c_in, tiles * c_in, 1))
    kept, out, kernels = torch.empty_like(history), torch.empty_like(residual), ops.kernels
    shape = f"L{level} {t}x{4 * band}x{cols} {c_in}->{c_out} 4x{columns}"
    pixels = min(4 * band, rows) * cols
    bench.row(
        f"winograd_input {shape}",
        lambda: kernels.winograd_input(x, gain, history, None, 0, components, kept),
        nbytes=((t + 2) * pixels * c_in + components.numel()) * float(size),
    )
    bench.row(
        f"winograd GEMM {shape}",
        lambda: kernels.tap_gemm(windows, weight, None, None, products.flatten(1, 3)),
        flops=2.0 * count * 3 * t * tiles * c_in * c_out,
    )
    bench.row(
        f"winograd_output {shape}",
        lambda: kernels.winograd_output(products, bias, residual, 0, out),
        nbytes=(2 * t * pixels * c_out + products.numel()) * float(size),
    )


def time_decode(bench: Bench, ops: CudaBackend) -> None:
    """Whole decodes of 121 frames at 704x1248."""
    vae = decode_weights.random_vae(decode_weights.SETS[0], ops.device)
    decoder = Decoder.from_state_dict(vae.state_dict(), device=ops.device, dtype="float16", backend=ops)
    del vae
    latents = torch.randn(1, 48, 31, 44, 78, device=ops.device)
    bench.row("decode of 121 frames", lambda: decoder.decode(latents), calls=DECODES)


def main() -> int:
    """Measures everything; 2 where the kernels cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a loop (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs an NVIDIA GPU with CUDA kernels: `wan22-vae-decode doctor` tells.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        meter = Meter(device)
    except (OSError, RuntimeError) as error:
        print(f"The driver's energy counter cannot be read: {error}", file=sys.stderr)
        return 2
    ops = backends.create("cuda", device, torch.float16)
    assert isinstance(ops, CudaBackend)
    bench = Bench(meter, arguments.seconds)
    with torch.no_grad():
        time_references(bench, device)
        for conv in CONVS:
            time_conv(bench, ops, *conv)
        time_decode(bench, ops)
    report = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device),
        "versions": decode.versions(),
        "limit_watts": meter.limit_watts(),
        "rows": [asdict(row) for row in bench.rows],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "energy.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
