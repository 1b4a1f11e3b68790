# SPDX-License-Identifier: Apache-2.0
"""The page of the flags has every option, field, command line switch and variable that the sources have."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import wan22_vae_decode
from wan22_vae_decode import Decoder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "fastvideo-kernel" / "wan22_vae_decode"
OVERLAY = ROOT / "fastvideo"
SOURCES = {file: ast.parse(file.read_text()) for root in (PACKAGE, OVERLAY) for file in root.rglob("*.py")}

# Written in capitals where variables are read, but none.
NO_VARIABLES = {"CUTLASS", "ERROR", "INFO", "PAN2", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"}


def rows(heading):
    """First cells of the tables under a heading, and the second ones."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return {name: row[1] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def class_of(file, name):
    return next(n for n in ast.walk(SOURCES[ROOT / file]) if isinstance(n, ast.ClassDef) and n.name == name)


@pytest.mark.parametrize("function", [Decoder.from_state_dict, Decoder.decode, Decoder.stream])
def test_options_of_the_decoder(function):
    table = rows("`Decoder`")
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        assert name in table
        if parameter.default not in (parameter.empty, None):
            default = parameter.default
            assert table[name].strip("`") == (f'"{default}"' if isinstance(default, str) else str(default)), name


@pytest.mark.parametrize("function", [wan22_vae_decode.why_not, Decoder.why_not])
def test_options_of_why_not(function):
    sentence = PAGE[PAGE.index("`why_not(") :].split("\n\n")[0]
    for name in set(inspect.signature(function).parameters) - {"self"}:
        assert re.search(rf"\b{name}\b", sentence), name


def test_options_of_enable():
    tree = SOURCES[PACKAGE / "integrations" / "diffusers.py"]
    enable = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "enable")
    sentence = PAGE[PAGE.index("`integrations.diffusers.enable(") :].split("\n\n")[0]
    for argument in enable.args.kwonlyargs:
        assert f"`{argument.arg}`" in sentence


@pytest.mark.parametrize(
    ("heading", "file", "name"),
    [
        ("FastVideo: `vae_config`", "fastvideo/configs/models/vaes/wan22_decode.py", "WanVAEConfig"),
        ("FastVideo: `PAN2PipelineConfig`", "fastvideo/configs/pipelines/pan2.py", "PAN2PipelineConfig"),
    ],
)
def test_fields_of_the_configs(heading, file, name):
    fields = {node.target.id: node.value for node in class_of(file, name).body if isinstance(node, ast.AnnAssign)}
    table = rows(heading)
    assert set(fields) == set(table) - {"field"}
    for field, value in fields.items():
        if isinstance(value, ast.Constant):
            default = value.value
            assert table[field].strip("`") == (f'"{default}"' if isinstance(default, str) else str(default)), field


def test_wan_configs_add_no_fields():
    tree = SOURCES[OVERLAY / "configs" / "pipelines" / "wan22_decode.py"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "_Config")):
            assert not [part for part in node.body if isinstance(part, ast.AnnAssign)], node.name


def test_command_line_options():
    """Of all commands together; ``--help`` says the rest."""
    section = PAGE.split("\n## Commands\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([^`]+)`", section))
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                for argument in node.args:
                    # A flag that is put together belongs to a config's field.
                    if isinstance(argument, ast.Constant) and argument.value.startswith("-"):
                        assert argument.value in named, (file.name, argument.value)


def test_help_has_the_options_that_the_page_gives_a_command():
    pytest.importorskip("safetensors")
    from wan22_vae_decode.cli import main

    section = PAGE.split("\n## Commands\n")[1].split("\n| other commands")[0]
    parser = main._parser()
    commands = next(action for action in parser._actions if action.choices).choices
    for command, options in re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE):
        known = {option for action in commands[command]._actions for option in action.option_strings}
        listed = set(re.findall(r"`(-[^`]+)`", options))
        assert listed == known - {"-h", "--help"}, command


def test_environment_variables():
    table = rows("Environment variables")
    for file, tree in SOURCES.items():
        if "environ" not in file.read_text():
            continue
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        for text in texts:
            if isinstance(text, str) and len(text) > 3 and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", text):
                assert text in table or text in NO_VARIABLES, (file.name, text)
    for file in SOURCES:
        for name in re.findall(r"\bWAN22_VAE_DECODE_[A-Z]+", file.read_text()):
            assert name in table, (file.name, name)


def test_variables_of_make():
    makefile = (ROOT / "Makefile").read_text()
    given = set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)) | set(re.findall(r"\$\((\w+_FLAGS)\)", makefile))
    assert given | {"IMAGE"} == set(rows("make"))
