# SPDX-License-Identifier: Apache-2.0
"""What Winograd costs in accuracy and saves in time, by level and tile: the choice in `heuristics.WINOGRAD_FORMS`.

    python benchmarks/winograd_levels.py

Decodes with the CUDA kernels in float16, with Winograd on different levels in tiles of four rows and four or three
columns, with products in float16 or float32. PSNR is against float32 without TF32, with both weight sets of
``decode_weights``; time is of 121 frames.
Writes JSON to benchmarks/results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import decode
import decode_weights
import torch

from wan22_vae_decode import Decoder
from wan22_vae_decode.accuracy import strict_float32
from wan22_vae_decode.backends.cuda.backend import CudaBackend
from wan22_vae_decode.layers import WinogradForm

# Level -> columns of a tile, and the levels whose products are float32; levels left out have direct convs.
CHOICES: tuple[tuple[dict[int, int], tuple[int, ...]], ...] = (
    ({}, ()),
    ({3: 4}, ()),
    ({2: 4, 3: 4}, ()),
    ({1: 3, 2: 4, 3: 4}, ()),
    ({1: 3, 2: 4, 3: 4}, (1,)),
    ({1: 4, 2: 4, 3: 4}, ()),
    ({1: 4, 2: 4, 3: 4}, (1,)),
    ({1: 3, 2: 3, 3: 3}, ()),
    ({0: 3, 1: 3, 2: 4, 3: 4}, ()),
    ({0: 3, 1: 3, 2: 4, 3: 4}, (0,)),
    ({0: 3, 1: 3, 2: 4, 3: 4}, (0, 1)),
    ({0: 4, 1: 3, 2: 4, 3: 4}, (0, 1)),
    ({0: 3, 1: 3, 2: 3, 3: 4}, (0, 1)),
)


class WithForms(CudaBackend):
    """The CUDA backend with given forms of its convs."""

    def __init__(self, base: CudaBackend, columns: dict[int, int], float_products: tuple[int, ...]) -> None:
        super().__init__(base.device, base.dtype, base.kernels)
        self._forms = {level: WinogradForm(m, level in float_products) for level, m in columns.items()}

    def winograd_form(self, level: int, c_in: int, c_out: int, split_rows: bool) -> WinogradForm | None:
        return self._forms.get(level)


def main() -> int:
    """Measures every choice; 2 where the kernels cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="timed decodes of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    base = decode.float16_kernels()
    if base is None:
        return 2
    device = base.device
    rows: list[dict[str, Any]] = [
        {"columns": columns, "float_products": levels, "psnr_db": {}, "worst_frame_db": {}}
        for columns, levels in CHOICES
    ]
    for kind in decode_weights.SETS:
        vae = decode_weights.random_vae(kind, device)
        generator = torch.Generator(device).manual_seed(1)
        latents = torch.randn(1, 48, 3, 44, 78, device=device, generator=generator)
        with torch.no_grad(), strict_float32():
            reference = vae.decode(latents).sample
        for row in rows:
            backend = WithForms(base, row["columns"], row["float_products"])
            decoder = Decoder.from_state_dict(vae.state_dict(), device=device, dtype="float16", backend=backend)
            row["psnr_db"][kind], row["worst_frame_db"][kind], _ = decode.compare(decoder.decode(latents), reference)
            if kind == decode_weights.SETS[0]:
                row["ms"] = milliseconds(decoder, arguments.repeats)
            print(kind, row, flush=True)
            del decoder
            torch.cuda.empty_cache()
    decode.write_report(arguments.out / "winograd_levels.json", rows=rows)
    return 0


def milliseconds(decoder: Decoder, repeats: int) -> float:
    """Median time of a decode of 121 frames at 704x1248, after one that warms up."""
    latents = torch.randn(1, 48, 31, 44, 78, device=decoder.device)
    decoder.decode(latents)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decoder.decode(latents)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
