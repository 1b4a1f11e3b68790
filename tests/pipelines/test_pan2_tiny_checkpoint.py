# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint: the same bytes for the same seed, read by every library, and a model that is not degenerate."""

import hashlib
import json
import types
from pathlib import Path

import diffusers
import pytest
import torch
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.configs.models.vaes import WanVAEConfig
from fastvideo.models.dits.pan2_checkpoint import check_checkpoint
from fastvideo.models.loader.component_loader import SchedulerLoader
from fastvideo.models.vaes.wanvae import AutoencoderKLWan
from fastvideo.pipelines.pan2 import tiny_checkpoint as script
from fastvideo.pipelines.pan2.tiny_checkpoint import main, write_tiny_checkpoint
from safetensors.torch import load_file


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


# Bytes


def test_the_same_seed_writes_the_same_bytes(tiny_checkpoint, tmp_path):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    write_tiny_checkpoint(tmp_path / "again", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    first = digests(tiny_checkpoint)
    assert digests(tmp_path / "again") == first
    # Over the earlier one, with other weights in the same layout.
    write_tiny_checkpoint(tmp_path / "again", seed=1)
    other = digests(tmp_path / "again")
    assert other.keys() == first.keys()
    assert {name for name in first if other[name] != first[name]} == {
        "text_encoder/model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }


def test_the_layout_is_the_released_one(tiny_checkpoint):
    index = json.loads((tiny_checkpoint / "model_index.json").read_text())
    assert index["_class_name"] == "PAN2Pipeline"
    for component, (_, name) in ((key, value) for key, value in index.items() if isinstance(value, list)):
        (config_file,) = [
            file
            for file in (tiny_checkpoint / component).iterdir()
            if file.name in ("config.json", "scheduler_config.json", "tokenizer_config.json")
        ]
        config = json.loads(config_file.read_text())
        assert name in (config.get("_class_name"), config.get("tokenizer_class"), *config.get("architectures", ()))
    assert sum(file.stat().st_size for file in tiny_checkpoint.rglob("*") if file.is_file()) < 50e6


# Loading


def test_the_transformer_is_complete(tiny_checkpoint):
    config = PAN2Config()
    config.update_model_arch(json.loads((tiny_checkpoint / "transformer" / "config.json").read_text()))
    assert config.num_attention_heads % 4 == 0
    check_checkpoint(tiny_checkpoint / "transformer", config)


@pytest.fixture(scope="module")
def vae(tiny_checkpoint) -> AutoencoderKLWan:
    """FastVideo's own class, strictly loaded."""
    config = WanVAEConfig()
    config.load_encoder = config.load_decoder = True
    config.update_model_arch(json.loads((tiny_checkpoint / "vae" / "config.json").read_text()))
    model = AutoencoderKLWan(config)
    model.load_state_dict(load_file(tiny_checkpoint / "vae" / "diffusion_pytorch_model.safetensors"), strict=True)
    return model.eval()


def random_latents(vae, seed: int, frames: int = 3) -> torch.Tensor:
    normal = torch.randn(1, 48, frames, 4, 6, generator=torch.Generator().manual_seed(seed))
    mean, std = (torch.tensor(part).view(1, -1, 1, 1, 1) for part in (vae.latents_mean, vae.latents_std))
    return normal * std + mean


@torch.no_grad()
def test_diffusers_and_fastvideo_decode_and_encode_the_same(tiny_checkpoint, vae):
    theirs, loading = diffusers.AutoencoderKLWan.from_pretrained(tiny_checkpoint / "vae", output_loading_info=True)
    assert not any(loading.values())
    latents = random_latents(vae, seed=3)
    video = vae.decode(latents)
    assert video.shape == (1, 3, 9, 64, 96)
    torch.testing.assert_close(theirs.decode(latents).sample, video, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs.encode(video).latent_dist.mode(), vae.encode(video).mode(), rtol=1e-3, atol=1e-3)


def test_the_scheduler_is_read_by_fastvideo(tiny_checkpoint):
    keeps_shift = types.SimpleNamespace(pipeline_config=types.SimpleNamespace(flow_shift=None))
    scheduler = SchedulerLoader().load(str(tiny_checkpoint / "scheduler"), keeps_shift)
    assert scheduler.shift == 7.0
    theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_checkpoint / "scheduler")
    assert theirs.shift == 7.0


def test_the_scheduler_as_diffusers_saves_it_is_read_by_fastvideo(tmp_path):
    diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0).save_pretrained(tmp_path)
    keeps_shift = types.SimpleNamespace(pipeline_config=types.SimpleNamespace(flow_shift=None))
    assert SchedulerLoader().load(str(tmp_path), keeps_shift).shift == 7.0


# Not degenerate


@torch.no_grad()
def test_random_latents_decode_to_the_whole_range(vae):
    video = vae.decode(random_latents(vae, seed=4))
    assert video.abs().max() == 1
    low, median, high = video.flatten().quantile(torch.tensor([0.02, 0.5, 0.98]))
    assert low < -0.7
    assert -0.2 < median < 0.2
    assert high > 0.7
    assert (video.abs() == 1).float().mean() < 0.08
    assert video.std(dim=(3, 4)).min() > 0.1
    # Time and latents are seen.
    assert (video[:, :, 1:] - video[:, :, :-1]).abs().mean() > 0.02
    assert (video - vae.decode(random_latents(vae, seed=5))).abs().mean() > 0.1


@torch.no_grad()
def test_images_encode_to_latents_of_the_usual_spread(vae):
    image = torch.randn(1, 3, 5, 7, generator=torch.Generator().manual_seed(6))
    image = torch.nn.functional.interpolate(image, size=(96, 128), mode="bilinear").clamp(-1, 1)
    latents = vae.encode(image[:, :, None]).mode()
    normal = (latents - torch.tensor(vae.latents_mean).view(1, -1, 1, 1, 1)) / torch.tensor(vae.latents_std).view(
        1, -1, 1, 1, 1
    )
    assert 0.5 < normal.std() < 2
    assert normal.mean().abs() < 0.5


# The command


def test_full_vae_writes_the_real_widths(tmp_path, monkeypatch):
    assert script.VAE["base_dim"] == 160
    assert script.VAE["decoder_base_dim"] == 256
    # The real widths are 2.8 GB; what the flag selects is seen with others.
    monkeypatch.setattr(script, "VAE", {**script.VAE, "base_dim": 24, "decoder_base_dim": 32})
    for full, widths in ((False, (16, 16)), (True, (24, 32))):
        write_tiny_checkpoint(tmp_path / "out", full_vae=full)
        config = json.loads((tmp_path / "out" / "vae" / "config.json").read_text())
        assert (config["base_dim"], config["decoder_base_dim"]) == widths


def test_the_command_writes_and_reports(tmp_path, capsys, tiny_checkpoint):
    main([str(tmp_path / "new" / "folder"), "--seed", "0"])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if " MB " in line] == [
        "transformer",
        "text_encoder",
        "tokenizer",
        "vae",
        "scheduler",
    ]
    assert digests(tmp_path / "new" / "folder") == digests(tiny_checkpoint)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("OUT", "--seed", "--full-vae", "2.8 GB"))


def test_other_files_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(SystemExit) as ended:
            main([str(out)])
        assert ended.value.code == 2
        assert "exists and is not a checkpoint" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
