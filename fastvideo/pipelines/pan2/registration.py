# SPDX-License-Identifier: Apache-2.0
"""Registers the PAN2 family with FastVideo: config, presets, pipeline discovery, generator hooks and, without CUDA,
the CPU preview.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.logger import init_logger
from fastvideo.pipelines.pan2 import upstream
from fastvideo.pipelines.pan2.checkpoint import is_pan2
from fastvideo.pipelines.pan2.presets import MODEL_FAMILY, PAN2_I2V, PAN2_T2V

_registered = False
logger = init_logger(__name__)


def register() -> None:
    """Registers everything once per process.

    Raises:
        ImportError: see :mod:`fastvideo.pipelines.pan2.upstream`.
    """
    global _registered
    if _registered:
        return
    upstream.check_ownership()
    upstream.check_names()
    _register_family()
    _register_vae()
    _extend_wan_configs()
    _add_cli_flags()
    _make_discoverable()

    from fastvideo.pipelines.pan2 import generator

    generator.install()
    if _has_only_a_cpu():
        from fastvideo.pipelines.pan2 import cpu_preview

        cpu_preview.install()
    _registered = True


def _has_only_a_cpu() -> bool:
    from fastvideo.platforms import current_platform

    return current_platform.is_cpu() and not torch.cuda.is_available()


def _register_family() -> None:
    from fastvideo.api.presets import register_preset
    from fastvideo.fastvideo_args import WorkloadType
    from fastvideo.registry import _MODEL_NAME_DETECTORS, register_configs

    register_configs(
        sampling_param_cls=None,
        pipeline_config_cls=PAN2PipelineConfig,
        workload_types=(WorkloadType.T2V, WorkloadType.I2V),
        model_detectors=[is_pan2],
        model_family=MODEL_FAMILY,
        default_preset=PAN2_T2V.name,
        pipeline_cls_name="PAN2Pipeline",
    )
    # Ours matches two exact class names; the others match words in paths, and the first match wins.
    _MODEL_NAME_DETECTORS.insert(0, _MODEL_NAME_DETECTORS.pop())
    for preset in (PAN2_T2V, PAN2_I2V):
        register_preset(preset)


def _register_vae() -> None:
    from fastvideo.models.registry import ModelRegistry
    from fastvideo.models.vaes.wan22_decode import AutoencoderKLWan

    # register_model() warns about the replacement that is meant here.
    ModelRegistry.models.pop("AutoencoderKLWan", None)
    ModelRegistry.register_model("AutoencoderKLWan", AutoencoderKLWan)


def _extend_wan_configs() -> None:
    """Gives the stock Wan2.2 TI2V-5B family the decoder's switches, off by default, where it is already registered.

    Registering a second time would lose to the first for local folders.
    """
    from fastvideo.configs.pipelines.wan import Wan2_2_TI2V_5B_Config
    from fastvideo.configs.pipelines.wan22_decode import EXTENDED
    from fastvideo.registry import _CONFIG_REGISTRY

    for info in _CONFIG_REGISTRY.values():
        if issubclass(info.pipeline_config_cls, Wan2_2_TI2V_5B_Config):
            extended = EXTENDED.get(info.pipeline_config_cls)
            if extended is None:
                logger.info("%s keeps FastVideo's own VAE decode.", info.pipeline_config_cls.__name__)
                continue
            info.pipeline_config_cls = extended


def _add_cli_flags() -> None:
    """Adds ``--vae-config.decode-kernel`` and its companions to FastVideo's flat argument parser."""
    from fastvideo.configs.models.vaes.base import VAEConfig
    from fastvideo.configs.models.vaes.wan22_decode import add_decode_arguments

    upstream = VAEConfig.add_cli_args

    def add_cli_args(parser: Any, prefix: str = "vae-config") -> Any:
        return add_decode_arguments(upstream(parser, prefix), prefix)

    VAEConfig.add_cli_args = staticmethod(add_cli_args)


def _make_discoverable() -> None:
    """Lets a discovery that already ran without us run again: FastVideo caches its scan of ``pipelines/basic``."""
    from fastvideo import registry
    from fastvideo.pipelines.pipeline_registry import _import_pipeline_classes_cached

    _import_pipeline_classes_cached.cache_clear()
    registry._PIPELINE_REGISTRY.clear()
    registry.get_model_info.cache_clear()
    sys.modules.pop("fastvideo.pipelines.basic.pan2.pan2_pipeline", None)
