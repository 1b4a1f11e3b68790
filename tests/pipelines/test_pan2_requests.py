# SPDX-License-Identifier: Apache-2.0
"""Bad requests and bad checkpoint folders: one clear sentence each, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fastvideo.api.sampling_param import SamplingParam
from fastvideo.pipelines.pan2.checkpoint import check_checkpoint, read_index
from fastvideo.pipelines.pan2.requests import check_output_path, check_request, load_image
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
        ({"seed": -1}, "seed is -1: give a whole number of at least 0."),
        ({"video_path": "v.mp4"}, "leave video_path out and pass image_path or pil_image."),
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
