# SPDX-License-Identifier: Apache-2.0
"""Prints, as JSON, what FastVideo knows about PAN2 before and after its import, and in a spawned process."""

import json
import multiprocessing
import os
import sys

# Before FastVideo's first import, as a user's script would do it; a spawned child imports this file again.
from fastvideo import registry
from fastvideo.models.registry import ModelRegistry
from fastvideo.pipelines.pipeline_registry import PipelineType, get_pipeline_registry


def knowledge(checkpoints: list[str]) -> dict:
    """The pipeline classes, the VAE class and the resolution of each checkpoint folder."""
    vae, _ = ModelRegistry.resolve_model_cls("AutoencoderKLWan")
    found = {}
    for folder in checkpoints:
        try:
            info = registry.get_model_info(folder)
            found[os.path.basename(folder)] = [info.pipeline_cls.__name__, info.pipeline_config_cls.__name__]
        except (RuntimeError, ValueError) as error:
            found[os.path.basename(folder)] = str(error).split(":")[0]
    return {
        "pipeline": "PAN2Pipeline"
        in get_pipeline_registry(PipelineType.BASIC).get_supported_pipelines(PipelineType.BASIC),
        "vae": vae.__module__,
        "checkpoints": found,
        "presets": [registry.get_preset_selection(folder) for folder in checkpoints],
    }


def child(config, checkpoints, connection) -> None:
    """Runs in a spawned process, which knows PAN2 only through its config."""
    connection.send([type(config).__name__, config.flow_shift, knowledge(checkpoints)])


def main(checkpoints: list[str]) -> None:
    result = {"before": knowledge(checkpoints)}
    import fastvideo.pipelines.pan2 as pan2

    result["after"] = knowledge(checkpoints)
    from fastvideo.pipelines.pan2.registration import register

    configs = len(registry._CONFIG_REGISTRY)
    register()
    result["registered_twice"] = len(registry._CONFIG_REGISTRY) - configs

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(pan2.PAN2PipelineConfig(flow_shift=3.0), checkpoints, theirs))
    process.start()
    theirs.close()
    result["child"] = ours.recv()
    process.join()
    with open(os.environ["RESULT"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1:])
