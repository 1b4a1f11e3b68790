# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, statuses, and refusals in one line."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

import wan22_vae_decode
from wan22_vae_decode.cli import doctor, extras, subject

COMMANDS = ("doctor", "build", "verify", "bench", "decode")


def test_help_names_every_command_and_status(cli):
    ended = cli("--help")
    assert ended.status == 0
    for words in (*COMMANDS, "0 all is well", "1 a check failed", "2 wrong use"):
        assert words in ended.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_its_options(command, cli):
    ended = cli(command, "--help")
    assert ended.status == 0
    assert "--json" in ended.out


def test_version(cli):
    assert cli("--version").out.strip() == wan22_vae_decode.__version__


def test_module_runs_as_a_program():
    def run(*arguments):
        command = [sys.executable, "-m", "wan22_vae_decode", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert "doctor" in run("--help").stdout
    ended = run("decode", "absent.npy", "--vae", "absent", "-o", "out.mp4")
    assert ended.returncode == 2
    assert ended.stderr == ("error: absent is no folder; --vae names the VAE's folder of a Wan2.2 TI2V-5B checkpoint\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("paint",), "invalid choice: 'paint'"),
        (("build", "--arch", "sm_75"), "invalid choice: 'sm_75'"),
        (("verify", "--size", "704x1248"), "704x1248 is no ROWSxCOLUMNSxFRAMES, for example 704x1248x121"),
        (("verify", "--size", "700x1248x9"), "700x1248x9: rows and columns must be multiples of 16"),
        (("verify", "--size", "0x16x9"), "0x16x9: rows and columns must be multiples of 16"),
        (("bench", "--size", "32x32x8"), "32x32x8: frames must be one more than a multiple of 4"),
        (("verify", "--size", "160000x16x1"), "160000x16x1 is more than 65536 rows and columns"),
        (("verify", "--size", f"16x16x{4 * 10**20 + 1}"), "1000001 frames"),
        (("bench", "--repeats", "0"), "0 is no whole number from 1"),
        (("bench", "--channels", "9" * 20), f"{'9' * 20} is no whole number from 1 to 4096"),
        (("bench", "--only", "cuda"), "cuda is not of cuda|torch:float16|"),
        (("bench", "--only", "jax:float16"), "jax:float16 is not of"),
        (("verify", "--frames-per-pass", "62"), "62 is neither auto nor from 1 to 61"),
        (("verify", "--seed", str(2**64)), f"{2**64} has more than 64 bits"),
        (("bench", "--seed", str(-(2**63) - 1)), "has more than 64 bits"),
        (("verify", "--min-db", "nan"), "nan is no finite number"),
        (("verify", "--min-db", "inf"), "inf is no finite number"),
        (("verify", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("verify", "--backend", "jax"), "invalid choice: 'jax'"),
        (("decode", "z.npy", "-o", "z.mp4"), "the following arguments are required: --vae"),
        (("decode", "z.npy", "--vae", "", "-o", "z.mp4"), "argument --vae: an empty name is no file or folder"),
        (("decode", "", "--vae", "v", "-o", "z.mp4"), "argument latents: an empty name is no file or folder"),
        (("decode", "z.npy", "--vae", "v", "-o", ""), "argument -o/--output: an empty name is no file or folder"),
        (("bench", "--out", ""), "argument --out: an empty name is no file or folder"),
        (("verify", "--vae", ""), "argument --vae: an empty name is no file or folder"),
        (("verify", "--vae", "a\0b"), "argument --vae: a name with a NUL character is no file or folder"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4/"), "-o/--output: z.mp4/ names a folder; give the file a name"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--key", ""), "argument --key: an empty name is no tensor"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--fps", "0"), "0 is not from 0.001 to 1000 frames a second"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--fps", "x"), "x is not from 0.001 to 1000 frames a second"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--fps", "1e-9"), "1e-9 is not from 0.001 to 1000 frames"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--fps", "1e9"), "1e9 is not from 0.001 to 1000 frames"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--fps", "nan"), "nan is not from 0.001 to 1000 frames"),
        (("decode", "z.npy", "--vae", "v", "-o", "z.mp4", "--crf", "52"), "52 is no whole number from 0 to 51"),
    ],
)
def test_wrong_use_is_status_2_with_the_reason(arguments, sentence, cli):
    ended = cli(*arguments)
    assert ended.status == 2
    assert sentence in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not ended.out


@pytest.mark.parametrize("command", [("doctor",), ("verify",), ("bench",)])
def test_devices_that_are_not_there(command, cli, monkeypatch):
    for name in ("toaster", "mps", "meta", "xpu", "cpu:1", "cuda:", "cuda:9999", ""):
        sentence = f"--device {name} is neither cpu nor cuda, with or without a number such as cuda:1"
        assert cli(*command, "--device", name) == (2, "", f"error: {sentence}\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli(*command, "--device", "cuda") == (
        2,
        "",
        "error: torch sees no CUDA device: see `wan22-vae-decode doctor`, or use --device cpu\n",
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli(*command, "--device", "cuda:2") == (
        2,
        "",
        "error: --device cuda:2: there are 2 CUDA devices, counted from 0\n",
    )


def test_lack_of_memory_is_one_line(cli, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words.")

    monkeypatch.setattr(subject, "random_state_dict", full)
    assert cli("bench", "--device", "cpu") == (
        2,
        "",
        "error: out of memory: CUDA out of memory. Tried to allocate 2 GiB.\n",
    )


def test_interrupt_is_one_word_and_status_130(cli, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli("doctor") == (130, "", "interrupted\n")


def test_ignored_signals_stay_ignored_and_others_get_their_handlers_back(cli, monkeypatch):
    seen = []
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    monkeypatch.setattr(doctor, "run", lambda _: seen.extend(map(signal.getsignal, numbers)))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cli("doctor")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert callable(seen[0])
    assert seen[1] == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert seen[2] != signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_terminate", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal_does_not_interrupt_the_unwinding(to_terminate, second, cli, monkeypatch):
    unwound = []

    def run(arguments):
        try:
            signal.raise_signal(to_terminate)
        finally:
            signal.raise_signal(second)
            unwound.append(True)

    monkeypatch.setattr(doctor, "run", run)
    assert cli("doctor").status == 128 + to_terminate
    assert unwound


def start_program(program, *arguments, path=""):
    """A Python program on which an interrupt has its usual effect, as it has not in a shell's background jobs."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end_of(process):
    """Its status and what it wrote, as far as that was not read yet."""
    with process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def run_program(program, *arguments, path=""):
    return end_of(start_program(program, *arguments, path=path))


def shower(process):
    """Interrupts a program until it has ended, faster than it can end."""
    limit = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < limit
        process.send_signal(signal.SIGINT)
        time.sleep(0.0005)
    return end_of(process)


SCRIPT = ("-c", "import sys; from wan22_vae_decode.__main__ import main; sys.exit(main())")


@pytest.mark.parametrize("program", [("-m", "wan22_vae_decode"), SCRIPT], ids=["module", "script"])
def test_interrupt_while_torch_is_loaded_is_one_word_and_status_130(program, tmp_path):
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nraise RuntimeError\n")
    assert run_program(program, "doctor", path=tmp_path) == (130, "", "interrupted\n")


@pytest.mark.parametrize("repetition", range(3))
def test_shower_of_interrupts_while_torch_is_loaded_is_one_word(repetition, tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    process = start_program(("-m", "wan22_vae_decode"), "doctor", path=tmp_path)
    assert process.stdout.readline() == "loading\n"
    assert shower(process) == (130, "", "interrupted\n")


@pytest.mark.parametrize("repetition", range(3))
def test_shower_of_interrupts_of_a_bench_is_one_word(repetition, tmp_path):
    arguments = ("--device", "cpu", "--size", "256x256x401", "--out", tmp_path / "times")
    process = start_program(("-m", "wan22_vae_decode"), "bench", *arguments)
    assert process.stderr.readline() == "timing torch float32 ...\n"
    # Into the decode, which holds memory that takes time to free.
    time.sleep(0.5)
    assert shower(process) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("repetition", range(3))
def test_shower_of_interrupts_of_a_decode_is_one_word_and_no_file(repetition, vae_folder, tmp_path):
    save_file({"latents": torch.zeros(1, 4, 2000, 4, 4)}, tmp_path / "long.safetensors")
    out = tmp_path / "out"
    out.mkdir()
    arguments = (tmp_path / "long.safetensors", "--vae", vae_folder, "-o", out / "v.mp4", "--device", "cpu")
    process = start_program(("-m", "wan22_vae_decode"), "decode", *arguments)
    while not list(out.iterdir()):
        assert process.poll() is None, end_of(process)
        time.sleep(0.05)
    assert shower(process) == (130, "", "interrupted\n")
    assert not list(out.iterdir())


def test_interrupt_after_the_end_changes_nothing():
    late = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT); " + SCRIPT[1]
    assert run_program(("-c", late), "build", "--arch", "sm_75")[0] == 2
    status, _, err = run_program(("-c", late), "decode", "absent.npy", "--vae", "absent", "-o", "out.mp4")
    assert status == 2
    assert err.startswith("error: absent is no folder; ")
    assert len(err.splitlines()) == 1


def test_reader_that_ends_early_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "wan22_vae_decode", "doctor", "--device", "cpu"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_missing_extra_is_one_sentence_with_the_command(monkeypatch, capsys):
    for module in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, module, None)
    sentence = "the plot needs matplotlib: pip install matplotlib"
    with pytest.raises(extras.MissingExtraError, match="the plot needs matplotlib"):
        extras.require("matplotlib", "the plot")
    assert extras.optional("matplotlib.pyplot", "the plot") is None
    assert capsys.readouterr().err == sentence + "\n"
    assert extras.require("json", "nothing").__name__ == "json"
