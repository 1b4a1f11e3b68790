# SPDX-License-Identifier: Apache-2.0
"""The switches of the decoder in FastVideo's own Wan2.2 TI2V-5B configs: how they are found, set, refused and kept."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from pathlib import Path

import fastvideo.pipelines.pan2  # noqa: F401 (registers)
import pytest
from fastvideo.configs.models.vaes.wan22_decode import WanVAEConfig
from fastvideo.configs.models.vaes.wanvae import WanVAEConfig as UpstreamWanVAEConfig
from fastvideo.configs.pipelines import wan, wan22_decode
from fastvideo.configs.pipelines.base import PipelineConfig
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.registry import _CONFIG_REGISTRY, get_pipeline_config_cls_from_name
from fastvideo.utils import FlexibleArgumentParser

MODEL = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
SWITCHES = [field.name for field in fields(WanVAEConfig) if field.name.startswith("decode_")]


def folder(parent: Path, name: str, class_name: str = "WanPipeline") -> str:
    """A local checkpoint as far as FastVideo looks to choose its config."""
    path = parent / name
    (path / "transformer").mkdir(parents=True)
    (path / "transformer" / "config.json").write_text("{}")
    (path / "model_index.json").write_text(json.dumps({"_class_name": class_name, "_diffusers_version": "0.35.0"}))
    return str(path)


def config(**changes) -> PipelineConfig:
    return PipelineConfig.from_kwargs({"model_path": MODEL} | changes)


# Found


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (MODEL, wan22_decode.Wan2_2_TI2V_5B_Config),
        ("Wan2.2-TI2V-5B-Diffusers", wan22_decode.Wan2_2_TI2V_5B_Config),
        ("someone-else/wan2.2-ti2v-5b-diffusers", wan22_decode.Wan2_2_TI2V_5B_Config),
        ("FastVideo/FastWan2.2-TI2V-5B-FullAttn-Diffusers", wan22_decode.FastWan2_2_TI2V_5B_Config),
        ("decart-ai/Lucy-Edit-Dev", wan22_decode.LucyEditDevConfig),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", wan.WanT2V480PConfig),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", wan.Wan2_2_T2V_A14B_Config),
    ],
)
def test_model_ids_and_short_names_resolve(model, found):
    assert get_pipeline_config_cls_from_name(model) is found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Wan2.2-TI2V-5B-Diffusers", wan22_decode.Wan2_2_TI2V_5B_Config),
        ("FastWan2.2-TI2V-5B-Diffusers", wan22_decode.FastWan2_2_TI2V_5B_Config),
        # Upstream goes by the pipeline's class where the name tells nothing, and takes it for Wan2.1.
        ("my-finetune", wan.WanT2V480PConfig),
    ],
)
def test_local_folders_resolve_as_upstream_resolves_them(name, found, tmp_path):
    assert get_pipeline_config_cls_from_name(folder(tmp_path, name)) is found


def test_every_registered_ti2v_config_has_the_switches():
    derived = [
        info.pipeline_config_cls
        for info in _CONFIG_REGISTRY.values()
        if issubclass(info.pipeline_config_cls, wan.Wan2_2_TI2V_5B_Config)
    ]
    assert set(derived) == set(wan22_decode.EXTENDED.values())


@pytest.mark.parametrize("upstream", wan22_decode.EXTENDED)
def test_configs_are_upstream_s_but_for_the_switches(upstream):
    ours, theirs = wan22_decode.EXTENDED[upstream](), upstream()
    assert isinstance(ours, upstream)
    assert type(ours).__name__ == upstream.__name__
    assert [field.name for field in fields(ours)] == [field.name for field in fields(theirs)]
    for field in fields(upstream):
        # Components' configs hold tensors and functions, which do not compare.
        if field.name not in {"vae_config", "dit_config", "text_encoder_configs"}:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert type(ours.vae_config) is WanVAEConfig
    assert type(theirs.vae_config) is UpstreamWanVAEConfig
    for field in fields(UpstreamWanVAEConfig):
        if field.name != "arch_config":
            assert getattr(ours.vae_config, field.name) == getattr(theirs.vae_config, field.name), field.name
    for field in fields(theirs.vae_config.arch_config):
        if field.name != "scaling_factor":
            assert getattr(ours.vae_config, field.name) == getattr(theirs.vae_config, field.name), field.name
    assert not ours.vae_config.decode_kernel
    assert not ours.vae_config.decode_kernel_parallel


# Set


def test_dict_override_sets_the_switches():
    changed = config(pipeline_config={"vae_config": {"decode_kernel": True, "decode_frames_per_pass": 2}})
    assert changed.vae_config.decode_kernel
    assert changed.vae_config.decode_frames_per_pass == 2
    assert changed.vae_config.load_decoder
    assert not config().vae_config.decode_kernel, "and only there"


def test_dotted_override_sets_the_switches():
    changed = config(**{"vae_config.decode_kernel": True, "vae_config.decode_backend": "torch"})
    assert changed.vae_config.decode_kernel
    assert changed.vae_config.decode_backend == "torch"


def test_file_keeps_and_sets_the_switches(tmp_path):
    values = {
        "decode_kernel": True,
        "decode_kernel_parallel": True,
        "decode_frames_per_pass": "auto",
        "decode_dtype": "bfloat16",
        "decode_backend": "torch",
    }
    assert sorted(values) == sorted(SWITCHES)
    config(pipeline_config={"vae_config": values}).dump_to_json(str(tmp_path / "config.json"))
    read = config(pipeline_config=str(tmp_path / "config.json"))
    assert {name: getattr(read.vae_config, name) for name in SWITCHES} == values


def test_upstream_s_own_config_object_still_counts_as_off():
    given = wan.Wan2_2_TI2V_5B_Config()
    assert config(pipeline_config=given) is given
    assert not hasattr(given.vae_config, "decode_kernel")


@pytest.mark.parametrize("upstream", wan22_decode.EXTENDED)
def test_pickle_keeps_class_and_switches(upstream):
    before = wan22_decode.EXTENDED[upstream]()
    before.vae_config.decode_kernel = True
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is type(before)
    assert after.vae_config.decode_kernel
    assert type(after.vae_config) is WanVAEConfig


# Refused


def test_misspelt_switch_is_refused():
    with pytest.raises(AttributeError, match="Invalid field: decode_kernle"):
        config(pipeline_config={"vae_config": {"decode_kernle": True}})


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        (
            {"decode_kernel_parallel": True},
            "decode_kernel_parallel splits the kernel decode over ranks: set decode_kernel",
        ),
        ({"decode_kernel": True, "decode_dtype": "fp8"}, "decode_dtype is 'fp8'"),
        ({"decode_kernel": True, "decode_frames_per_pass": 0}, "decode_frames_per_pass is 0"),
    ],
)
@pytest.mark.parametrize("dotted", [False, True])
def test_switches_without_meaning_are_refused_before_anything_is_loaded(switches, sentence, dotted, tmp_path):
    override = {f"vae_config.{name}": value for name, value in switches.items()}
    if not dotted:
        override = {"pipeline_config": {"vae_config": switches}}
    model = folder(tmp_path, "Wan2.2-TI2V-5B-Diffusers")
    with pytest.raises(ValueError, match=sentence):
        FastVideoArgs.from_kwargs(model_path=model, **override)


def test_flat_command_line_flags_reach_the_config():
    model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    parser = FastVideoArgs.add_cli_args(FlexibleArgumentParser())
    flags = ("--vae-config.decode-kernel", "true", "--vae-config.decode-frames-per-pass", "2")
    config = FastVideoArgs.from_cli_args(parser.parse_args(["--model-path", model, *flags])).pipeline_config
    assert config.vae_config.decode_kernel
    assert config.vae_config.decode_frames_per_pass == 2
    plain = FastVideoArgs.from_cli_args(parser.parse_args(["--model-path", model])).pipeline_config
    assert not plain.vae_config.decode_kernel
    assert plain.vae_config.decode_frames_per_pass == 4
