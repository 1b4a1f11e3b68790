# SPDX-License-Identifier: Apache-2.0
"""Bad requests and bad checkpoint folders: one clear sentence each, before anything is loaded."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fastvideo.api.sampling_param import SamplingParam
from fastvideo.models.dits import pan2_checkpoint
from fastvideo.pipelines.pan2.checkpoint import check_checkpoint, read_index, with_local_components
from fastvideo.pipelines.pan2.requests import check_output_path, check_request, load_image, to_rgb
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

GOOD = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 3, "seed": 0}


def request(**changes) -> SamplingParam:
    sampling = SamplingParam()
    for name, value in (GOOD | changes).items():
        setattr(sampling, name, value)
    return sampling


def test_good_request_passes():
    check_request(request())
    check_request(request(num_frames=1))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"height": 700}, "height is 700: PAN2 needs a positive multiple of 32, for example 704."),
        ({"width": 1240}, "width is 1240: PAN2 needs a positive multiple of 32, for example 1248."),
        ({"height": 0}, "height is 0: PAN2 needs a positive multiple of 32, for example 32."),
        ({"width": -32}, "width is -32: PAN2 needs a positive multiple of 32, for example 32."),
        ({"height": None}, "height is None: PAN2 needs a positive multiple of 32, for example 704."),
        ({"width": 64.0}, "width is 64.0: PAN2 needs a positive multiple of 32, for example 64."),
        ({"num_frames": 120}, "num_frames is 120: PAN2 needs 4k + 1 frames, for example 121."),
        ({"num_frames": 0}, "num_frames is 0: PAN2 needs 4k + 1 frames, for example 1."),
        ({"num_frames": None}, "num_frames is None: PAN2 needs 4k + 1 frames, for example 313."),
        ({"num_inference_steps": 0}, "num_inference_steps is 0: give a whole number of at least 1."),
        ({"num_inference_steps": -5}, "num_inference_steps is -5: give a whole number of at least 1."),
        ({"num_videos_per_prompt": 0}, "num_videos_per_prompt is 0: give a whole number of at least 1."),
        ({"sigmas": [1.0, 0.5]}, "PAN2 makes its own noise schedule from num_inference_steps: leave sigmas out."),
        ({"timesteps": [999]}, "PAN2 makes its own noise schedule from num_inference_steps: leave timesteps out."),
        ({"seed": -1}, "seed is -1: give a whole number from 0 to 2^63"),
        ({"seed": 2**70}, "give a whole number from 0 to 2^63 - num_videos_per_prompt."),
        ({"fps": 0}, "fps is 0: give a whole number of at least 1."),
        ({"guidance_scale": float("nan")}, "guidance_scale is nan: give a finite number"),
        ({"guidance_scale": float("inf")}, "guidance_scale is inf: give a finite number"),
        ({"return_trajectory_decoded": True}, "PAN2 has no return_trajectory_decoded: leave it out."),
        ({"guidance_rescale": 0.7}, "PAN2 has no guidance_rescale: leave it out."),
        ({"pil_image": "photo.png"}, "pil_image is a str: give a PIL image, or the file's path as image_path."),
        ({"image_path": ["a.png"]}, "image_path is a list: give the path of one image file."),
        ({"image_path": "a.png", "pil_image": Image.new("L", (4, 4))}, "Both image_path and pil_image are given"),
        (
            {"video_path": "v.mp4"},
            "PAN2 has no video_path: leave it out; image_path or pil_image give the first frame.",
        ),
        ({"image_path": "clip.mp4"}, "image_path clip.mp4 is a video: PAN2 takes one still image"),
        ({"image_path": "missing.png"}, "image_path missing.png does not exist or is not a file."),
    ],
)
def test_bad_request_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=r".+") as raised:
        check_request(request(**changes))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@given(size=st.integers(-100, 5000), frames=st.integers(-10, 500))
def test_refused_sizes_come_with_one_that_is_accepted(size, frames):
    for name, value in (("height", size), ("num_frames", frames)):
        try:
            check_request(request(**{name: value}))
        except ValueError as error:
            check_request(request(**{name: int(str(error).rstrip(".").rsplit(" ", 1)[1])}))


def test_unreadable_and_animated_images_are_refused(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        load_image(tmp_path / "broken.png")
    frames = [Image.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (0, 99, 200)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="holds 3 frames"):
        load_image(tmp_path / "moving.gif")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["png", "tiff", "jpeg", "gif", "bmp", "webp"])
def test_damaged_images_are_refused_in_one_sentence(tmp_path, kind):
    generator = np.random.default_rng(0)
    file = tmp_path / f"image.{kind}"
    Image.fromarray(generator.integers(0, 255, (20, 30, 3), np.uint8)).save(file)
    whole = file.read_bytes()
    refused = []
    for _ in range(60):
        damaged = bytearray(whole[: generator.integers(1, len(whole))])
        for position in generator.integers(0, len(damaged), 4):
            damaged[position] = generator.integers(0, 255)
        file.write_bytes(bytes(damaged))
        try:
            assert load_image(file).mode == "RGB"
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 5
    assert all(str(file) in sentence for sentence in refused)


def test_jpeg_with_a_preview_beside_it_is_one_picture(tmp_path):
    picture, preview = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    picture.save(tmp_path / "camera.jpg", format="MPO", save_all=True, append_images=[preview])
    assert load_image(tmp_path / "camera.jpg").getpixel((8, 8))[0] > 200


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bit_greys_keep_their_brightness(tmp_path, suffix):
    greys = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(greys).save(tmp_path / f"grey.{suffix}")
    loaded = np.asarray(load_image(tmp_path / f"grey.{suffix}"))
    assert np.abs(loaded[..., 0].astype(float) - greys / 257).max() <= 1
    eight_bit = Image.new("I", (4, 4), 200)
    assert np.asarray(to_rgb(eight_bit)).max() == 200


def test_image_is_turned_upright(tmp_path):
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:2] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter turn clockwise
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    upright = np.asarray(load_image(tmp_path / "turned.png"))
    assert upright.shape == (6, 4, 3)
    assert upright[:, 2:].min() == 255


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="which is a file"):
        check_output_path(tmp_path / "file" / "sub" / "video.mp4")
    check_output_path(tmp_path / "new" / "folder" / "video.mp4")


def test_name_that_is_too_long_is_refused_before_the_work(tmp_path):
    with pytest.raises(ValueError, match="file name has over 255 bytes"):
        check_output_path(tmp_path / ("\U0001f98a" * 81 + ".mp4"))


def test_unwritable_output_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="is not writable"):
        check_output_path(tmp_path / "video.mp4")


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def check(folder: Path, sp_size: int = 1) -> None:
    check_checkpoint(folder, read_index(folder), sp_size=sp_size)


def test_complete_checkpoint_passes(checkpoint):
    check(checkpoint)
    check(checkpoint, sp_size=4)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "scheduler", "tokenizer"])
def test_missing_component_is_named(checkpoint, component):
    shutil.rmtree(checkpoint / component)
    with pytest.raises(ValueError, match=f"lacks {component}/"):
        check(checkpoint)
    edit(checkpoint / "model_index.json", **{component: [None, None]})
    with pytest.raises(ValueError, match=f"does not list a {component}"):
        check(checkpoint)


@pytest.mark.parametrize("component", ["transformer", "vae", "scheduler"])
def test_wrong_component_class_is_named(checkpoint, component):
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    edit(checkpoint / component / name, _class_name="SomethingElse")
    with pytest.raises(ValueError, match=f"{component} of .* is a SomethingElse: PAN2 needs"):
        check(checkpoint)


def test_wrong_text_encoder_is_named(checkpoint):
    edit(checkpoint / "text_encoder" / "config.json", architectures=["T5EncoderModel"])
    with pytest.raises(ValueError, match=r"text_encoder of .* is a T5EncoderModel"):
        check(checkpoint)


def test_transformer_weights_are_compared_before_loading(checkpoint):
    (weights,) = (checkpoint / "transformer").glob("*.safetensors")
    tensors = load_file(weights)
    tensors["stray.weight"] = tensors.pop("proj_out.bias")
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=r"missing: proj_out\.bias; unexpected: stray\.weight"):
        check(checkpoint)


def test_vae_weights_are_compared_before_loading(checkpoint):
    (weights,) = (checkpoint / "vae").glob("*.safetensors")
    tensors = load_file(weights)
    del tensors["decoder.conv_out.bias"]
    tensors["encoder.conv_in.weight"] = tensors["encoder.conv_in.weight"][:1].clone()
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=r"the VAE .* missing: decoder\.conv_out\.bias; misshapen: encoder\.conv_in"):
        check(checkpoint)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_absent_weights_are_named(checkpoint, component):
    for file in (checkpoint / component).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=f"{component} holds no safetensors files"):
        check(checkpoint)


def test_weights_that_may_not_be_read_are_not_called_missing(checkpoint, monkeypatch):
    def denied(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError, match=r"Permission denied: .*\.safetensors"):
        pan2_checkpoint.stored_shapes(checkpoint / "vae")


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("vae/config.json", {"z_dim": 16}, "the vae's z_dim is 16, the transformer's out_channels is 48"),
        (
            "text_encoder/config.json",
            {"hidden_size": 8},
            "the text encoder's hidden_size is 8, the transformer's text_embed",
        ),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "uses dynamic shifting"),
        ("transformer/config.json", {"rope_axes_dim": 3}, "has a value of the wrong type"),
        ("vae/config.json", {"latents_mean": [0.0] * 47 + [float("nan")]}, "gives a latents_mean that is not finite"),
        ("vae/config.json", {"latents_std": [0.0] * 48}, "gives a latents_std that is not positive and finite"),
        ("vae/config.json", {"latents_std": [1.0] * 47 + [float("inf")]}, "gives a latents_std that is not positive"),
    ],
)
def test_components_that_do_not_fit_are_refused(checkpoint, file, changes, sentence):
    edit(checkpoint / file, **changes)
    with pytest.raises(ValueError, match=sentence):
        check(checkpoint)


def test_broken_weight_index_is_refused(checkpoint):
    (checkpoint / "transformer" / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(ValueError, match=r"index\.json is not an index of weight files"):
        check(checkpoint)


def test_open_entries_of_a_modular_index_are_found_in_their_folders(checkpoint):
    index = read_index(checkpoint)
    index["vae"] = [None, None, {"type_hint": ["diffusers", "AutoencoderKLWan"]}]
    check_checkpoint(checkpoint, index)
    assert with_local_components(index, checkpoint)["vae"][:2] == ["diffusers", "AutoencoderKLWan"]
    shutil.rmtree(checkpoint / "vae")
    with pytest.raises(ValueError, match="does not list a vae"):
        check_checkpoint(checkpoint, index)


def test_chat_template_without_the_user_header_is_refused(checkpoint):
    (checkpoint / "tokenizer" / "chat_template.jinja").write_text("{{ messages[1].content }}")
    with pytest.raises(ValueError, match=r"does not write the header '<\|im_start\|>user\\n'"):
        check(checkpoint)


def test_unreadable_tokenizer_is_refused(checkpoint):
    (checkpoint / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be loaded"):
        check(checkpoint)


def test_folder_without_index_and_broken_index_are_refused(checkpoint):
    (checkpoint / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model_index\.json cannot be read as JSON"):
        read_index(checkpoint)
    (checkpoint / "model_index.json").unlink()
    with pytest.raises(ValueError, match=r"neither model_index\.json nor modular_model_index\.json"):
        read_index(checkpoint)


def test_heads_that_ranks_cannot_share_are_refused(checkpoint):
    with pytest.raises(ValueError, match="4 attention heads cannot be shared by 3 sequence-parallel ranks"):
        check(checkpoint, sp_size=3)
