# SPDX-License-Identifier: Apache-2.0
"""Whole generations with the VAE's switches set in different ways: ``vae_generate.py RUNS OUT``.

RUNS is JSON: by name, a ``checkpoint``, the ``options`` of ``from_pretrained``, ``sampling`` where it differs from the
one below, and, for a worker in this process, ``switches`` to set in the VAE's config before the generation. Frames are
saved as ``OUT/<name>.<rank>.npy``.
"""

import json
import os
import sys
from typing import Any

import numpy as np
from fastvideo.entrypoints.video_generator import VideoGenerator

REQUEST: dict[str, Any] = {
    "prompt": "a lighthouse in a storm",
    "negative_prompt": "blurred",
    "sampling": {
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 2.5,
        "seed": 3,
    },
    "output": {"save_video": False, "return_frames": True},
}


def vae_of(generator: VideoGenerator) -> Any:
    """The VAE of a worker in this process, None for workers of their own."""
    worker = getattr(generator.executor, "worker", None)
    return worker and worker.pipeline.get_module("vae")


def main(runs: str, out: str) -> None:
    # Not at the top of this file: a spawned worker, which imports it again, must register by its config alone.
    import fastvideo.pipelines.pan2  # noqa: F401

    generators: dict[str, VideoGenerator] = {}
    rank = os.environ.get("RANK", "0")
    for name, run in json.loads(runs).items():
        key = json.dumps([run["checkpoint"], run["options"]])
        if rank == "0":
            print(f"Run {name}:", flush=True)
        if key not in generators:
            generators[key] = VideoGenerator.from_pretrained(run["checkpoint"], **run["options"])
        vae = vae_of(generators[key])
        for field, value in run.get("switches", {}).items():
            setattr(vae.config, field, value)
        request = REQUEST | {"sampling": REQUEST["sampling"] | run.get("sampling", {})}
        frames = generators[key].generate(request).frames
        if frames:
            np.save(f"{out}/{name}.{rank}.npy", np.stack(frames))
        with open(f"{out}/{name}.{rank}.json", "w") as file:
            report = vae.decode_report() if vae else None
            config = type(generators[key].fastvideo_args.pipeline_config)
            json.dump({"report": report, "config": f"{config.__module__}.{config.__qualname__}"}, file)
    for generator in generators.values():
        generator.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
