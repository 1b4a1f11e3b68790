# SPDX-License-Identifier: Apache-2.0
"""Registration: explicit, idempotent, late if need be, and carried into spawned workers by the config."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
from fastvideo.configs.models.vaes.wan22_decode import WanVAEConfig
from fastvideo.configs.pipelines.pan2 import PAN2PipelineConfig
from fastvideo.pipelines.pan2.registration import is_pan2

HIJACKED = "cosmos_turbowan"  # words that FastVideo's other detectors look for in paths
INDEXES = {
    HIJACKED: ("model_index.json", "PAN2Pipeline"),
    "plain": ("model_index.json", "PAN2Pipeline"),
    "modular_class": ("model_index.json", "PAN2ModularPipeline"),
    "modular_index": ("modular_model_index.json", "PAN2ModularPipeline"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory, run_python, scripts, tiny_checkpoint) -> dict:
    """What a fresh process sees before and after the import, with one folder for each kind of index."""
    root = tmp_path_factory.mktemp("registration")
    folders = []
    for name, (file, class_name) in INDEXES.items():
        folder = root / name
        (folder / "transformer").mkdir(parents=True)
        index = json.loads((tiny_checkpoint / "model_index.json").read_text())
        (folder / file).write_text(json.dumps(index | {"_class_name": class_name}))
        shutil.copy(tiny_checkpoint / "transformer" / "config.json", folder / "transformer")
        folders.append(str(folder))
    result = root / "result.json"
    run_python(scripts / "registration.py", *folders, RESULT=str(result))
    return json.loads(result.read_text())


def test_nothing_happens_without_the_import(seen):
    before = seen["before"]
    assert not before["pipeline"]
    assert before["vae"] == "fastvideo.models.vaes.wanvae"
    others = {str(found) for name, found in before["checkpoints"].items() if name != HIJACKED}
    assert others == {"No model info found for model path"}
    assert before["checkpoints"][HIJACKED] != ["PAN2Pipeline", "PAN2PipelineConfig"]


@pytest.mark.parametrize("kind", INDEXES)
def test_import_makes_every_kind_of_checkpoint_known_even_after_a_discovery(seen, kind):
    after = seen["after"]
    assert after["pipeline"]
    assert after["vae"] == "fastvideo.models.vaes.wan22_decode"
    assert after["checkpoints"][kind] == ["PAN2Pipeline", "PAN2PipelineConfig"]
    assert after["presets"] == [["pan2_t2v", "pan2"]] * len(INDEXES)


def test_registering_twice_changes_nothing(seen):
    assert seen["registered_twice"] == 0


def test_spawned_process_registers_when_it_receives_the_config(seen):
    name, flow_shift, knowledge = seen["child"]
    assert (name, flow_shift) == ("PAN2PipelineConfig", 3.0)
    assert knowledge == seen["after"]


def test_detector_ignores_paths_that_mention_pan2():
    assert is_pan2("PAN2ModularPipeline")
    assert not is_pan2("/data/pan2/wan2.2-ti2v")
    assert not is_pan2("wanpipeline")


@pytest.mark.parametrize("shift", [0.0, -3.0, float("nan"), float("inf")])
def test_shift_that_is_not_positive_is_refused(shift):
    with pytest.raises(ValueError, match=r"flow_shift is .*: give a positive number"):
        PAN2PipelineConfig(flow_shift=shift).check_pipeline_config()


def test_decode_switches_are_one_state_with_the_vae_config():
    config = PAN2PipelineConfig()
    assert config.vae_config.decode_kernel
    assert config.vae_config.decode_kernel_parallel
    config.update_pipeline_config({"vae_config": {"decode_kernel": False}})
    config.check_pipeline_config()
    assert not config.vae_decode_kernel
    assert not config.vae_decode_kernel_parallel
    config.update_pipeline_config({"vae_decode_kernel": True})
    assert config.vae_config.decode_kernel
    assert not copy.deepcopy(config).vae_decode_kernel_parallel
    assert not PAN2PipelineConfig(vae_decode_kernel=False).vae_config.decode_kernel
    assert not PAN2PipelineConfig(vae_config=WanVAEConfig(decode_kernel=False)).vae_decode_kernel


def test_misspelt_switch_is_refused():
    with pytest.raises(AttributeError, match="Invalid field: decode_kernle"):
        PAN2PipelineConfig().update_pipeline_config({"vae_config": {"decode_kernle": True}})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"decode_backend": "cudnn"}, "decode_backend is 'cudnn'; choose one of auto, cuda, torch"),
        ({"decode_dtype": "fp8"}, "decode_dtype is 'fp8'; choose one of auto, float16"),
        ({"decode_frames_per_pass": 0}, "decode_frames_per_pass is 0; give a whole number"),
        ({"decode_frames_per_pass": "many"}, "decode_frames_per_pass is 'many'; give a whole number"),
    ],
)
def test_switch_without_meaning_is_refused(changes, sentence):
    config = PAN2PipelineConfig()
    config.update_pipeline_config({"vae_config": changes})
    with pytest.raises(ValueError, match=sentence):
        config.check_pipeline_config()
