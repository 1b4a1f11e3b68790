# SPDX-License-Identifier: Apache-2.0
"""FastVideo's own tests of its api and stages still pass with PAN2 registered."""

from __future__ import annotations

import re
from pathlib import Path

import fastvideo

TESTS = Path(fastvideo.__file__).parent / "tests"
EXCLUDED = {
    "test_load_run_config_supports_yaml_roundtrip": "fails without us: its expectation lacks options of the schema",
    "test_lucy_edit_registry_and_preset": "wants the registered class itself, where ours extends it by the decoder's "
    "switches (test_vae_decode_config.py compares the two)",
}
# Imports FastVideo's HTTP server, whose dependencies PAN2 does not need and the CPU set does not install.
SERVER_TEST = "api/test_schema_parity_inventory.py"


def test_fastvideo_s_api_and_stage_tests_pass_with_pan2_registered(run_python, tmp_path):
    excluded = ("-k", "not " + " and not ".join(EXCLUDED), f"--ignore={TESTS / SERVER_TEST}")
    options = ("-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null")
    register = ("-p", "fastvideo.pipelines.pan2")
    done = run_python("-m", "pytest", *options, *register, *excluded, TESTS / "api", TESTS / "stages", check=False)
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", summary)[1]) > 250, summary
