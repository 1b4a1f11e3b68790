# SPDX-License-Identifier: Apache-2.0
"""Generates from a list of requests and saves what came back; runs under ``python`` and under ``torchrun`` alike."""

import json
import os
import sys

import fastvideo.pipelines.pan2  # noqa: F401 (registers PAN2)
import numpy as np
from fastvideo.entrypoints.video_generator import VideoGenerator

DEFAULTS = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 2.5, "seed": 3}


if "PAN2_TEST_UNWRITABLE" in os.environ and os.environ.get("RANK") == "0":
    # The first rank alone finds a folder without permission; root would be let in everywhere.
    os.access = lambda path, mode: False


def main(checkpoint: str, out: str, generator_options: str, requests: str) -> None:
    options, requests = json.loads(generator_options), json.loads(requests)
    generator = VideoGenerator.from_pretrained(checkpoint, **options)
    rank = os.environ.get("RANK", "0")
    for name, request in requests.items():
        request["sampling"] = DEFAULTS | request.get("sampling", {})
        request.setdefault("prompt", "a lighthouse in a storm")
        request.setdefault("output", {"save_video": False, "return_frames": True})
        try:
            result = generator.generate(request)
        except ValueError as error:
            with open(f"{out}/{name}.rank{rank}.json", "w") as file:
                json.dump({"error": str(error)}, file)
            continue
        if result.frames:
            np.save(f"{out}/{name}.rank{rank}.npy", np.stack(result.frames))
        stages = result.logging_info.stages if result.logging_info else {}
        with open(f"{out}/{name}.rank{rank}.json", "w") as file:
            json.dump({"video_path": result.video_path, "stages": stages}, file)
    generator.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
