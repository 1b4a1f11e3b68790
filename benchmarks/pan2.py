# SPDX-License-Identifier: Apache-2.0
"""PAN2 in FastVideo on a GPU: the demo's two videos, and one denoising step of the released size.

    python benchmarks/pan2.py

The demo runs with the tiny random checkpoint and with the VAE at its real size. The step runs the 29 B transformer with
random weights (58 GB, made on the GPU) at 704x1248, 313 frames, with guidance, to show that it fits. Writes seconds and
peak GiB as JSON to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# One process that is its own worker, so that its memory can be read here.
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
os.environ.setdefault("MASTER_PORT", "29533")
os.environ["FASTVIDEO_STAGE_LOGGING"] = "1"

import torch


def parse_arguments() -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tiny", "full_vae", "step"), nargs="+", help="parts to run (default: all)")
    parser.add_argument("--steps", type=int, default=2, help="timed denoising steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=44, help="transformer blocks (default: the released 44)")
    parser.add_argument("--text-tokens", type=int, default=300, help="prompt length (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    return parser.parse_args()


def main() -> int:
    """Runs the parts and writes benchmarks/results/pan2.json."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("This benchmark needs an NVIDIA GPU; `make demo` runs the same pipeline on a CPU.", file=sys.stderr)
        return 2
    parts: dict[str, Any] = {
        "tiny": lambda: run_demo("--height", "192", "--width", "320"),
        "full_vae": lambda: run_demo("--full-vae", "--height", "704", "--width", "1248", "--frames", "121"),
        "step": lambda: denoising_step(arguments),
    }
    file = arguments.out / "pan2.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() and arguments.only else {}
    report |= {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in arguments.only or parts:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        report[name] = parts[name]()
        report[name] |= {
            "seconds_with_loading": round(time.perf_counter() - start, 2),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        print(name, json.dumps(report[name]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(file)
    return 0


def run_demo(*options: str) -> dict[str, Any]:
    """The demo's videos; seconds of each stage."""
    from fastvideo.pipelines.pan2 import demo

    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as scratch:
        settings = demo.parse_arguments([*options, "--out", out])
        results = demo.make_videos(settings, demo.sample_photograph(), Path(scratch))
        sizes = {name: (Path(out) / f"{name}.mp4").stat().st_size for name in results}
    report: dict[str, Any] = {"options": list(options)}
    for name, result in results.items():
        stages = result.logging_info.stages
        report[name] = {stage: round(values.get("execution_time", 0.0), 3) for stage, values in stages.items()}
        report[name] |= {key: stages["decoding_stage"][key] for key in ("decode_path", "decode_reason")}
        report[name]["bytes"] = sizes[name]
    return report


def denoising_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Guided Euler steps of the released-size transformer."""
    import fastvideo.pipelines.pan2 as pan2
    from fastvideo.configs.models.dits.pan2 import PAN2Config
    from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel
    from fastvideo.models.dits.pan2 import PAN2Transformer3DModel
    from fastvideo.models.dits.pan2_fusions import set_fused_kernels
    from fastvideo.models.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from fastvideo.pipelines.pan2.stages import PAN2DenoisingStage, PAN2TimestepPreparationStage
    from fastvideo.pipelines.pipeline_batch_info import ForwardBatch

    maybe_init_distributed_environment_and_model_parallel(1, 1)
    config = PAN2Config()
    config.arch_config.num_layers = arguments.layers
    device = torch.device("cuda")
    with torch.device("meta"):
        transformer = PAN2Transformer3DModel(config, hf_config={}).to(torch.bfloat16)
    transformer.to_empty(device=device)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.normal_(std=0.02)
    transformer.requires_grad_(False).eval()
    fused = set_fused_kernels(transformer, True)

    preset = pan2.PAN2_T2V.defaults
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    settings = SimpleNamespace(
        pipeline_config=pan2.PAN2PipelineConfig(),
        dit_cpu_offload=False,
        dit_layerwise_offload=False,
        use_fsdp_inference=False,
    )
    batch = ForwardBatch(data_type="video", num_inference_steps=50, guidance_scale=preset["guidance_scale"])
    shape = (1, 48, (preset["num_frames"] - 1) // 4 + 1, preset["height"] // 16, preset["width"] // 16)
    batch.latents = torch.randn(shape, device=device)
    batch.image_latent = torch.zeros(1, 49, *shape[2:], device=device)
    batch.prompt_embeds = [torch.randn(1, arguments.text_tokens, 4096, device=device)]
    batch.negative_prompt_embeds = [torch.randn(1, 12, 4096, device=device)]
    PAN2TimestepPreparationStage(scheduler).forward(batch, settings)
    schedule, stage = batch.timesteps, PAN2DenoisingStage(transformer, scheduler)
    seconds = []
    for step in range(arguments.steps + 1):  # the first warms up
        batch.timesteps = schedule[step : step + 1]
        torch.cuda.synchronize()
        start = time.perf_counter()
        stage.forward(batch, settings)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 3))
    finite = bool(torch.isfinite(batch.latents).all())
    parameters = sum(parameter.numel() for parameter in transformer.parameters())
    cleanup_dist_env_and_memory()
    return {
        "latents": list(shape),
        "parameters": parameters,
        "layers": arguments.layers,
        "text_tokens": [arguments.text_tokens, 12],
        "guidance_scale": preset["guidance_scale"],
        "fused_kernels": fused,
        "first_step_s": seconds[0],
        "step_s": seconds[1:],
        "finite": finite,
    }


if __name__ == "__main__":
    sys.exit(main())
