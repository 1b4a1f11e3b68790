# SPDX-License-Identifier: Apache-2.0
"""`decode`: the file holds the decoder's frames, whole or not at all."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from wan22_vae_decode import Decoder
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.cli import checkpoint
from wan22_vae_decode.cli.video_file import SUFFIXES, VideoFile


@pytest.fixture
def z(latents):
    return latents(3, 2, 3).float()


@pytest.fixture
def saved(z, tmp_path):
    """The latents in a file of each kind."""
    save_file({"latents": z, "noise": z + 1}, tmp_path / "z.safetensors")
    save_file({"z": z}, tmp_path / "only.safetensors")
    torch.save(z[0], tmp_path / "z.pt")
    torch.save({"latents": z, "step": 3}, tmp_path / "named.pth")
    torch.save(torch.nn.Parameter(z), tmp_path / "parameter.pt")
    np.save(tmp_path / "z.npy", z.numpy())
    return tmp_path


@pytest.fixture
def out(tmp_path):
    """A folder that holds results and nothing else."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def frames_of(path):
    """[F, H, W, 3] of a video file."""
    reader = imageio_ffmpeg.read_frames(str(path))
    cols, rows = next(reader)["size"]
    return torch.stack([torch.frombuffer(bytearray(frame), dtype=torch.uint8).view(rows, cols, 3) for frame in reader])


def expected(state_dict, z):
    """[F, H, W, 3] of the decoder."""
    return (
        Decoder.from_state_dict({k: v.float() for k, v in state_dict.items()})
        .decode(z, torch.uint8)[0]
        .permute(1, 2, 3, 0)
    )


def assert_close(actual, wanted):
    """Up to what a lossless encoder loses by its colour space and halved chroma."""
    assert actual.shape == wanted.shape
    actual, wanted = (frames.float().unfold(1, 4, 4).unfold(2, 4, 4).mean((-1, -2)) for frames in (actual, wanted))
    assert (actual - wanted).abs().mean() < 8


@pytest.mark.parametrize("name", ["z.safetensors", "only.safetensors", "z.pt", "named.pth", "parameter.pt", "z.npy"])
def test_file_holds_the_decoder_s_frames(name, cli, saved, vae_folder, state_dict, z, out):
    ended = cli("decode", saved / name, "--vae", vae_folder, "-o", out / "v.mp4", "--crf", 0, "--device", "cpu")
    assert ended.status == 0
    assert ended.out.startswith(f"{out / 'v.mp4'}: 9 frames of 32x48 in ")
    assert ended.out.endswith(" s (torch, float32)\n")
    assert [path.name for path in out.iterdir()] == ["v.mp4"]
    assert_close(frames_of(out / "v.mp4"), expected(state_dict, z))


def test_key_chooses_a_tensor_and_json_tells_what_was_written(cli, saved, vae_folder, state_dict, z, out):
    options = ("--key", "noise", "--fps", 12.5, "--crf", 0, "--frames-per-pass", 1, "--json", "--device", "cpu")
    ended = cli("decode", saved / "z.safetensors", "--vae", vae_folder.parent, "-o", out / "v.mkv", *options)
    report = json.loads(ended.out)
    assert report.pop("seconds") >= 0
    size = {"frames": 9, "height": 32, "width": 48}
    assert report == {"file": str(out / "v.mkv"), **size, "backend": "torch", "dtype": "float32"}
    assert next(imageio_ffmpeg.read_frames(str(out / "v.mkv")))["fps"] == 12.5
    assert_close(frames_of(out / "v.mkv"), expected(state_dict, z + 1))


def test_normalized_latents_are_denormalised_by_the_config(cli, saved, vae_folder, state_dict, z, out):
    ended = cli(
        "decode",
        saved / "z.npy",
        "--vae",
        vae_folder,
        "-o",
        out / "v.mp4",
        "--crf",
        0,
        "--normalized",
        "--device",
        "cpu",
    )
    assert ended.status == 0
    config = json.loads((vae_folder / "config.json").read_text())
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    assert_close(frames_of(out / "v.mp4"), expected(state_dict, z * std + mean))


def test_nan_is_told(cli, vae_folder, out, tmp_path):
    z = np.zeros((1, 4, 1, 2, 2), dtype=np.float32)
    z[..., 0] = np.nan
    np.save(tmp_path / "z.npy", z)
    ended = cli(
        "decode", tmp_path / "z.npy", "--vae", vae_folder, "-o", out / "v.mp4", "--normalized", "--device", "cpu"
    )
    assert ended.status == 0
    assert ended.err == "warning: the latents hold NaN or infinite values, which spoil the video\n"


def test_quality_is_crf_s(cli, saved, vae_folder, out):
    sizes = []
    for crf in (0, 40):
        file = out / f"{crf}.mp4"
        cli("decode", saved / "z.npy", "--vae", vae_folder, "-o", file, "--crf", crf, "--device", "cpu")
        sizes.append(file.stat().st_size)
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("fps", [0.001, 24000 / 1001, 999])
def test_every_rate_that_is_taken_is_the_file_s(fps, suffix, out):
    with VideoFile(out / f"v{suffix}", fps, 18) as file:
        file.write(torch.zeros(3, 9, 16, 16, dtype=torch.uint8))
    assert len(frames_of(out / f"v{suffix}")) == 9
    assert next(imageio_ffmpeg.read_frames(str(out / f"v{suffix}")))["fps"] == pytest.approx(fps, rel=1e-3)


@pytest.mark.parametrize("name", ["12:30.mp4", "n" * 245 + ".mp4", "\N{SNOWMAN}" * 80 + ".mkv"])
def test_any_file_name_will_do(name, cli, saved, vae_folder, out):
    assert cli("decode", saved / "z.npy", "--vae", vae_folder, "-o", out / name, "--device", "cpu").status == 0
    assert [path.name for path in out.iterdir()] == [name]


@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_link_is_written_through(exists, cli, saved, vae_folder, out, tmp_path):
    target, link = tmp_path / "target", out / "v.mp4"
    if exists:
        target.write_text("older")
    link.symlink_to(target)
    assert cli("decode", saved / "z.npy", "--vae", vae_folder, "-o", link, "--device", "cpu").status == 0
    assert link.is_symlink()
    assert len(frames_of(target)) == 9


@pytest.mark.parametrize("with_rich", [True, False])
def test_terminal_gets_a_progress_bar_or_the_reason_why_not(with_rich, cli, saved, vae_folder, out, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    ended = cli("decode", saved / "z.npy", "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    assert ended.status == 0
    if with_rich:
        assert "decoding" in ended.err
        assert "100%" in ended.err
    else:
        assert ended.err == "the progress bar needs rich: pip install rich\n"


# Refusals before anything is decoded


def refused(cli, *arguments):
    ended = cli("decode", *arguments)
    assert ended.status == 2
    assert not ended.out
    (line,) = ended.err.splitlines()
    return line.removeprefix("error: ")


def test_outputs_that_cannot_be(cli, saved, vae_folder, out):
    def refusal(path):
        return refused(cli, saved / "z.npy", "--vae", vae_folder, "-o", path, "--device", "cpu")

    assert refusal(out / "v.gif") == f"{out / 'v.gif'} must end in .mp4, .mkv, .mov"
    absent = out / "absent"
    assert refusal(absent / "v.mp4") == f"{absent / 'v.mp4'} cannot be written: {absent} is no folder"
    assert refusal("/proc/v.mp4").startswith("/proc/v.mp4 cannot be written: /proc takes no files (")
    (out / "folder.mp4").mkdir()
    assert refusal(out / "folder.mp4") == f"{out / 'folder.mp4'} cannot be written: it is a folder or a device"
    (out / "null.mp4").symlink_to(os.devnull)
    assert refusal(out / "null.mp4") == f"{out / 'null.mp4'} cannot be written: it is a folder or a device"
    (out / "loop.mp4").symlink_to("loop.mp4")
    assert refusal(out / "loop.mp4").endswith("cannot be written: Too many levels of symbolic links")
    assert refusal(out / f"{'n' * 300}.mp4").endswith("cannot be written: File name too long")


@pytest.mark.parametrize("module", ["numpy", "imageio_ffmpeg"])
def test_missing_extra(module, cli, saved, vae_folder, out, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    line = refused(cli, saved / "z.pt", "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    assert line == f"writing a video needs {module}: pip install {module.replace('_', '-')}"


def test_ffmpeg_that_did_not_come_with_its_package(cli, saved, vae_folder, out, monkeypatch):
    def absent():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", absent)
    line = refused(cli, saved / "z.pt", "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    assert line == "writing a video needs the program ffmpeg: install it, or let IMAGEIO_FFMPEG_EXE name it"
    assert f"--  extras      without ffmpeg\n                {line}\n" in cli("doctor", "--device", "cpu").out


def test_latents_that_cannot_be_read(cli, saved, vae_folder, out):
    def refusal(name, *options):
        return refused(
            cli, saved / name, "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu", *options
        ).replace(str(saved / name), "FILE")

    assert refusal("absent.npy") == "there is no file FILE"
    (saved / "z.bin").write_bytes(b"")
    assert refusal("z.bin") == "FILE is none of .safetensors, .pt, .pth, .npy"
    for kind in ("safetensors", "pt", "npy"):
        for content in (b"", b"nothing of the kind", (saved / f"z.{kind}").read_bytes()[:-40]):
            (saved / f"damaged.{kind}").write_bytes(content)
            sentence = refusal(f"damaged.{kind}")
            # With the type, as some of the messages are a bare key.
            assert re.match(rf"FILE cannot be read as {kind}: \w+(Error|Exception)\b", sentence), sentence
    assert refusal("z.safetensors", "--key", "y") == ("FILE holds no tensor y, but latents, noise; --key chooses one")
    assert refusal("z.npy", "--key", "y") == "FILE holds one tensor without a name; leave --key out"
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, saved / "several.safetensors")
    assert refusal("several.safetensors") == "FILE holds no tensor latents, but a, b; --key chooses one"
    save_file({f"z{n}": torch.zeros(1) for n in range(10, 60)}, saved / "many.safetensors")
    assert refusal("many.safetensors").endswith("but z10, z11, z12, z13 and 46 more; --key chooses one")
    torch.save([1, 2], saved / "list.pt")
    sentence = "FILE holds no tensor by name (list); save the latents as a tensor or in a dict of them"
    assert refusal("list.pt") == refusal("list.pt", "--key", "y") == sentence
    torch.save(os.system, saved / "code.pt")
    assert refusal("code.pt").startswith("FILE cannot be read as pt: ")


@pytest.mark.parametrize("file", ["latents", "weights"])
def test_files_that_may_not_be_read_are_not_called_missing(file, cli, saved, vae_folder, out, monkeypatch):
    denied = saved / "z.safetensors" if file == "latents" else vae_folder / "diffusion_pytorch_model-1.safetensors"

    def opened(path, *arguments):
        # Root may read every file.
        if path == denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, *arguments)

    monkeypatch.setattr(checkpoint, "open", opened, raising=False)
    line = refused(cli, saved / "z.safetensors", "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    assert line == f"{denied} cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((3, 2), "FILE holds [3, 2]; latents are [z, T, H, W] or [1, z, T, H, W]"),
        ((2, 4, 3, 2, 3), "FILE holds latents of 2 videos; decode takes those of one"),
        ((1, 5, 3, 2, 3), "latents have 5 channels, but this decoder takes 4"),
        ((1, 4, 0, 2, 3), "latents have no frames"),
    ],
)
def test_latents_of_wrong_shape(shape, sentence, cli, vae_folder, tmp_path, out):
    file = tmp_path / "z.npy"
    np.save(file, np.zeros(shape, dtype=np.float32))
    line = refused(cli, file, "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    assert line.replace(str(file), "FILE") == sentence
    assert not list(out.iterdir())


@pytest.mark.parametrize("options", [(), ("--normalized",)])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda z: z.long(), "int64"),
        (lambda z: z.cfloat(), "complex64"),
        (lambda z: z.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda z: z.to_sparse(), "sparse_coo float32"),
        (lambda z: z.to("meta"), "float32"),
    ],
)
def test_latents_of_another_type(change, kind, options, cli, vae_folder, tmp_path, out):
    file = tmp_path / "z.pt"
    torch.save(change(torch.ones(1, 4, 1, 2, 2)), file)
    line = refused(cli, file, "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu", *options)
    assert line == f"{file} holds a {kind} tensor; latents are float16, bfloat16, float32 or float64 in memory"
    assert not list(out.iterdir())


def test_a_tensor_that_two_files_hold_is_refused(cli, saved, vae_folder, out, tmp_path):
    shutil.copytree(vae_folder, tmp_path / "twice")
    file = tmp_path / "twice" / "diffusion_pytorch_model-0.safetensors"
    shutil.copy(file, file.with_name(f"z{file.name}"))
    line = refused(cli, saved / "z.pt", "--vae", tmp_path / "twice", "-o", out / "v.mp4", "--device", "cpu")
    assert f"z{file.name} holds" in line
    assert "as another file in" in line


def test_weights_that_are_not_finite_are_refused(cli, saved, vae_folder, out, tmp_path, state_dict):
    shutil.copytree(vae_folder, tmp_path / "vae")
    for file in (tmp_path / "vae").glob("*-1.safetensors"):
        tensors = load_file(file)
        tensors["decoder.norm_out.gamma"][2] = np.nan
        save_file(tensors, file)
    line = refused(cli, saved / "z.pt", "--vae", tmp_path / "vae", "-o", out / "v.mp4", "--device", "cpu")
    assert line == "the weights hold NaN or values beyond float32, in decoder.norm_out.gamma; load or copy them again"
    assert not list(out.iterdir())


def test_vae_of_a_pipeline_is_found_beside_other_tensors(cli, saved, vae_folder, out, tmp_path):
    pipeline = tmp_path / "pipeline"
    shutil.copytree(vae_folder, pipeline / "vae")
    (pipeline / "model_index.json").write_text("{}")
    save_file({"latents": torch.zeros(1)}, pipeline / "latents.safetensors")
    assert cli("decode", saved / "z.pt", "--vae", pipeline, "-o", out / "v.mp4", "--device", "cpu").status == 0


def test_names_that_the_file_system_refuses(cli, saved, vae_folder, out):
    long = "n" * 300
    for arguments in ((f"{long}.pt", "--vae", vae_folder), (saved / "z.pt", "--vae", long)):
        line = refused(cli, *arguments, "-o", out / "v.mp4", "--device", "cpu")
        assert "File name too long" in line


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_output_that_nobody_reads_is_not_needed(closed, saved, vae_folder, out):
    descriptor = {"stdout": 1, "stderr": 2}[closed]
    program = "import os, sys\nfrom wan22_vae_decode.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-W", "ignore", "-c", program, "decode", saved / "z.pt", "--vae", vae_folder]
    command = shlex.join(map(str, [*words, "-o", out / "v.mp4", "--device", "cpu"]))
    ended = subprocess.run(f"{command} {descriptor}>&-", shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (out / "v.mp4").exists()


def test_full_disk_of_the_output_is_told(saved, vae_folder, out):
    command = [sys.executable, "-m", "wan22_vae_decode", "decode", saved / "z.pt", "--vae", vae_folder]
    command += ["-o", out / "v.mp4", "--device", "cpu"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "--normalized needs latents_mean and latents_std in FILE (FileNotFoundError: "),
        ("{", "--normalized needs latents_mean and latents_std in FILE (JSONDecodeError: "),
        ("{}", "--normalized needs latents_mean and latents_std in FILE (KeyError: 'latents_mean')"),
        ("[]", "--normalized needs latents_mean and latents_std in FILE (TypeError: "),
        ("[" * 10**5, "--normalized needs latents_mean and latents_std in FILE (RecursionError: "),
        (
            '{"latents_mean": "a", "latents_std": 1}',
            "FILE gives latents_mean and latents_std for other than 4 channels",
        ),
        (
            '{"latents_mean": [0.0], "latents_std": [1.0]}',
            "FILE gives latents_mean and latents_std for other than 4 channels",
        ),
        (
            '{"latents_mean": [0, 0, NaN, 0], "latents_std": [1, 1, 1, 1]}',
            "FILE gives no latents_mean from -1e+06 to 1e+06: that of channel 2 is nan",
        ),
        (
            '{"latents_mean": [0, 0, 0, 0], "latents_std": [0, 0, 0, 0]}',
            "FILE gives no latents_std from 1e-06 to 1e+06: that of channel 0 is 0",
        ),
        (
            '{"latents_mean": [0, 0, 0, 0], "latents_std": [1, 1, 1, -2]}',
            "FILE gives no latents_std from 1e-06 to 1e+06: that of channel 3 is -2",
        ),
        (
            '{"latents_mean": [0, 0, 0, 0], "latents_std": [1, Infinity, NaN, 1]}',
            "FILE gives no latents_std from 1e-06 to 1e+06: that of channel 1 is inf",
        ),
        (
            f'{{"latents_mean": [0, 0, 0, {10**400}], "latents_std": [1, 1, 1, 1]}}',
            "FILE gives no latents_mean from -1e+06 to 1e+06: that of channel 3 is 1000000000000000",
        ),
        (
            '{"latents_mean": [0, 0, 0, 0], "latents_std": [1, 1e300, 1, 1]}',
            "FILE gives no latents_std from 1e-06 to 1e+06: that of channel 1 is 1e+300",
        ),
        (
            '{"latents_mean": [0, 0, 0, 0], "latents_std": [1, 1, 1e-300, 1]}',
            "FILE gives no latents_std from 1e-06 to 1e+06: that of channel 2 is 1e-300",
        ),
        (
            '{"latents_mean": [0, 0, 0, 0], "latents_std": [1, true, 1, 1]}',
            "FILE gives no latents_std from 1e-06 to 1e+06: that of channel 1 is True",
        ),
        (
            '{"latents_mean": [0, [0], 0, 0], "latents_std": [1, 1, 1, 1]}',
            "FILE gives no latents_mean from -1e+06 to 1e+06: that of channel 1 is [0]",
        ),
    ],
)
def test_configs_without_the_normalisation(config, sentence, cli, saved, vae_folder, out, tmp_path):
    folder = tmp_path / "vae"
    folder.mkdir()
    for path in vae_folder.glob("*.safetensors"):
        (folder / path.name).symlink_to(path)
    if config is not None:
        (folder / "config.json").write_text(config)
    command = ("decode", saved / "z.npy", "--vae", folder, "-o", out / "v.mp4", "--device", "cpu")
    ended = cli(*command, "--normalized")
    assert ended.status == 2
    assert ended.err.replace(str(folder / "config.json"), "FILE").startswith(f"error: {sentence}")
    assert len(ended.err) < 400 + len(str(folder))
    assert cli(*command).status == 0, "only --normalized needs it"


# Failures in the middle


def test_failed_decode_leaves_the_older_file(cli, saved, vae_folder, out, monkeypatch):
    (out / "v.mp4").write_text("older")
    heads = []
    head = TorchBackend.output_head

    def second_fails(self, *arguments):
        heads.append(1)
        if len(heads) > 1:
            raise torch.OutOfMemoryError("full")
        head(self, *arguments)

    monkeypatch.setattr(TorchBackend, "output_head", second_fails)
    command = (saved / "z.npy", "--vae", vae_folder, "-o", out / "v.mp4", "--frames-per-pass", 1, "--device", "cpu")
    assert refused(cli, *command).startswith("a pass of 1 latent frames needs ")
    assert [path.name for path in out.iterdir()] == ["v.mp4"]
    assert (out / "v.mp4").read_text() == "older"


@pytest.fixture
def fake_ffmpeg(tmp_path, monkeypatch):
    """Puts a shell script in ffmpeg's place."""

    def install(script):
        path = tmp_path / "ffmpeg"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(path))

    return install


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("cat > /dev/null", "[Errno 2] No such file or directory: "),
        ("echo 'No space left on device' >&2; exit 1", "ffmpeg ended with No space left on device"),
        ("cat > /dev/null; echo 'a warning\n\nNo space left' >&2; exit 1", "ffmpeg ended with No space left"),
        ("exit 3", "ffmpeg ended with no word"),
    ],
)
def test_encoder_that_fails_leaves_nothing(script, sentence, cli, saved, vae_folder, out, fake_ffmpeg):
    fake_ffmpeg(script)
    line = refused(
        cli, saved / "z.npy", "--vae", vae_folder, "-o", out / "v.mp4", "--frames-per-pass", 1, "--device", "cpu"
    )
    assert line.startswith(f"{out / 'v.mp4'} could not be written: {sentence}")
    assert not list(out.iterdir())


def test_encoder_that_is_not_there(cli, saved, vae_folder, out, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nonexistent")
    line = refused(cli, saved / "z.npy", "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    assert line == f"{out / 'v.mp4'} could not be written: [Errno 2] No such file or directory: '/nonexistent'"


def test_video_without_frames_is_no_file(out):
    with pytest.raises(RuntimeError, match="would have no frames"), VideoFile(out / "v.mp4", 24, 18):
        pass
    assert not list(out.iterdir())


# Frames larger than a pipe holds, so that a stuck encoder blocks its writer; the child is not the one that we started.
STUCK = """#!/bin/sh
for last; do :; done
touch "${last#file:}"
sleep 100
true
"""


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize(
    ("how", "times", "status"),
    [(signal.SIGINT, 1, 130), (signal.SIGINT, 4, 130), (signal.SIGTERM, 1, 143), (signal.SIGHUP, 1, 129)],
)
def test_interrupted_run_leaves_nothing(how, times, status, stuck, vae_folder, out, tmp_path):
    np.save(tmp_path / "long.npy", np.zeros((1, 4, 2000, 4, 4), dtype=np.float32))
    command = [sys.executable, "-m", "wan22_vae_decode", "decode", tmp_path / "long.npy", "--vae", vae_folder]
    command += ["-o", out / "v.mp4", "--frames-per-pass", "8", "--device", "cpu"]
    environment = dict(os.environ)
    if stuck:
        (tmp_path / "ffmpeg").write_text(STUCK)
        (tmp_path / "ffmpeg").chmod(0o755)
        environment["IMAGEIO_FFMPEG_EXE"] = str(tmp_path / "ffmpeg")

    def heed_signals():
        # A shell's background jobs, and what they start, ignore the first; nohup's ignore the second.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals, env=environment
    )
    limit = time.monotonic() + 60
    while not list(out.iterdir()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)
    for _ in range(times):
        process.send_signal(how)
        time.sleep(0.1)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err == ("interrupted\n" if how == signal.SIGINT else "")
    assert not list(out.iterdir())
