# SPDX-License-Identifier: Apache-2.0
"""``python -m fastvideo.pipelines.pan2.demo``: a PAN2 video from a prompt and one from a photograph, without
downloads or a GPU.

The checkpoint is a tiny random one in the real layout: every component, stage and shape rule is PAN2's, the
pictures are textures.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPT = "A red fox trots through fresh snow at dawn, the camera following at its side."
I2V_PROMPT = "Steam rises from the cup while the camera moves slowly closer."

# FastVideo probes for NPUs at import and reports an error where there are none, in each of its processes.
logging.getLogger("fastvideo.platforms").setLevel(logging.CRITICAL)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The demo's options."""
    parser = argparse.ArgumentParser(prog="python -m fastvideo.pipelines.pan2.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the videos and contact sheets (default: %(default)s)"
    )
    parser.add_argument(
        "--image", type=Path, help="photograph for image-to-video (default: one that scikit-image ships)"
    )
    parser.add_argument("--model", type=Path, help="a PAN2 checkpoint folder (default: a tiny random one is made)")
    parser.add_argument(
        "--full-vae", action="store_true", help="give the random checkpoint a VAE of the real size (2.8 GB)"
    )
    parser.add_argument("--height", type=int, default=192, help="pixels, a multiple of 32 (default: %(default)s)")
    parser.add_argument("--width", type=int, default=320, help="pixels, a multiple of 32 (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=33, help="4k + 1 frames (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps (default: %(default)s)")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs, or CPU processes, to share the work (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=7, help="of noise and random weights (default: %(default)s)")
    parser.add_argument(
        "--decode-backend",
        choices=("auto", "cuda", "torch"),
        default="auto",
        help="how to decode: the CUDA kernels or else FastVideo's own decode (auto), or the reference ops (torch)",
    )
    parser.add_argument("--verbose", action="store_true", help="show FastVideo's log")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Makes both videos; returns the exit code."""
    arguments = parse_arguments(argv)
    level = "INFO" if arguments.verbose else "ERROR"
    logging.getLogger("fastvideo").setLevel(level)
    # For the workers, whose FastVideo reads it when it is first imported.
    os.environ.setdefault("FASTVIDEO_LOGGING_LEVEL", level)
    os.environ["FASTVIDEO_STAGE_LOGGING"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from fastvideo.pipelines.pan2.requests import load_image

    try:
        image = arguments.image.expanduser() if arguments.image else sample_photograph()
        load_image(image)
        with tempfile.TemporaryDirectory(prefix="pan2-demo-") as scratch:
            make_videos(arguments, image, Path(scratch))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_videos(arguments: argparse.Namespace, image: Path, scratch: Path) -> dict[str, Any]:
    """Runs FastVideo's generator for both workloads, prints what each stage took, and returns the results by name."""
    from fastvideo.entrypoints.video_generator import VideoGenerator
    from fastvideo.pipelines.pan2.requests import check_request
    from fastvideo.pipelines.pan2.tiny_checkpoint import write_tiny_checkpoint
    from rich.console import Console

    check_request(SimpleNamespace(**request_of(arguments), num_videos_per_prompt=1))
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    model = arguments.model
    if model is None:
        model = scratch / "checkpoint"
        with console.status("Writing a tiny random PAN2 checkpoint ..."):
            write_tiny_checkpoint(model, seed=arguments.seed, full_vae=arguments.full_vae)
    start = time.perf_counter()
    with console.status("Starting FastVideo and loading the model ..."):
        switches = {"vae_config": {"decode_backend": arguments.decode_backend}}
        generator = VideoGenerator.from_config(
            {
                "model_path": str(model),
                "engine": {"num_gpus": arguments.gpus},
                "pipeline": {"experimental": {"pipeline_config": switches}},
            }
        )
    console.print(f"FastVideo ready after {time.perf_counter() - start:.1f} s")
    results = {}
    try:
        for name, prompt, inputs in (
            ("pan2_t2v", PROMPT, {}),
            ("pan2_i2v", I2V_PROMPT, {"image_path": str(image)}),
        ):
            console.print(f"[bold]{name}[/bold]: {prompt}")
            # FastVideo numbers a video whose name is taken: an earlier run's stays until this one is complete.
            video = scratch / f"{name}.mp4"
            results[name] = generator.generate(
                {
                    "prompt": prompt,
                    "inputs": inputs,
                    "sampling": request_of(arguments),
                    "output": {"output_path": str(video), "save_video": True, "return_frames": True},
                }
            )
            shutil.copyfile(video, arguments.out / f"{name}.mp4")
            write_contact_sheet(results[name].frames, arguments.out / f"{name}.png")
    finally:
        generator.shutdown()
    console.print(stage_table(results))
    for name in results:
        console.print(f"{arguments.out / name}.mp4, contact sheet {arguments.out / name}.png")
    return results


def request_of(arguments: argparse.Namespace) -> dict[str, int]:
    """The options as FastVideo's sampling fields."""
    return {
        "height": arguments.height,
        "width": arguments.width,
        "num_frames": arguments.frames,
        "num_inference_steps": arguments.steps,
        "seed": arguments.seed,
    }


def sample_photograph() -> Path:
    """A real photograph that scikit-image ships (a cup of coffee, by Rachel Michetti, CC0)."""
    import skimage

    return Path(skimage.__file__).parent / "data" / "coffee.png"


def write_contact_sheet(frames: list[Any], file: Path, columns: int = 4, rows: int = 2) -> None:
    """Writes evenly spaced frames, each [H, W, 3] uint8, as one PNG."""
    from PIL import Image

    picks = [frames[round(index * (len(frames) - 1) / (columns * rows - 1))] for index in range(columns * rows)]
    height, width, _ = picks[0].shape
    sheet = Image.new("RGB", (columns * width, rows * height))
    for index, frame in enumerate(picks):
        sheet.paste(Image.fromarray(frame), (index % columns * width, index // columns * height))
    sheet.save(file)


def stage_table(results: dict[str, Any]) -> Any:
    """A table of seconds per stage and video, with the decode path and why it was taken."""
    from rich.table import Table

    table = Table("stage", *(f"{name}, s" for name in results), title="PAN2")
    stages = {name: result.logging_info.stages for name, result in results.items()}
    for stage in next(iter(stages.values())):
        table.add_row(stage, *(f"{stages[name][stage].get('execution_time', 0):.2f}" for name in results))
    decoding = [stages[name]["decoding_stage"] for name in results]
    table.add_section()
    for metric in ("decode_path", "decode_reason"):
        table.add_row(metric.replace("_", " "), *(stage.get(metric) or "-" for stage in decoding))
    return table


if __name__ == "__main__":
    sys.exit(main())
