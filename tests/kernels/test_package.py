# SPDX-License-Identifier: Apache-2.0
"""The package's public names are there, and told, before any of them is loaded."""

import subprocess
import sys

import pytest

import wan22_vae_decode

MODULES = ("accuracy", "backends", "decoder", "errors", "memory", "weights")


def test_import_loads_no_torch_but_tells_every_public_name():
    program = "import sys, wan22_vae_decode; print('torch' in sys.modules, *dir(wan22_vae_decode))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded, *told = ended.stdout.split()
    assert loaded == "False"
    assert {*wan22_vae_decode.__all__, *MODULES} <= {*told}


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_need_no_import_of_their_own(name, monkeypatch):
    monkeypatch.delitem(vars(wan22_vae_decode), name, raising=False)
    assert getattr(wan22_vae_decode, name) is sys.modules[f"wan22_vae_decode.{name}"]


def test_public_names_are_kept_once_they_were_wanted(monkeypatch):
    for name in wan22_vae_decode.__all__:
        monkeypatch.delitem(vars(wan22_vae_decode), name, raising=False)
        assert getattr(wan22_vae_decode, name) is vars(wan22_vae_decode)[name]


def test_other_names_are_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'wan22_vae_decode' has no attribute 'Decodr'"):
        wan22_vae_decode.Decodr  # noqa: B018
