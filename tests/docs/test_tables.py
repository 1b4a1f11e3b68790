# SPDX-License-Identifier: Apache-2.0
"""The measured tables agree with the committed JSON, and the error study's with its test."""

import ast
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(page):
    return (DOCS / page).read_text(encoding="utf-8")


def test_pages_agree_with_the_json(tables):
    for page in tables.PAGES:
        assert tables.rewritten(text(page), tables.RESULTS) == text(page), "run python docs/tables.py"


def test_every_table_is_on_a_page_once(tables):
    found = [match["name"] for page in tables.PAGES for match in tables.BLOCK.finditer(text(page))]
    assert sorted(found) == sorted(tables.TABLES)


def test_other_results_give_other_tables(tables, tmp_path):
    shutil.copytree(tables.RESULTS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "decode.json"
    report = json.loads(file.read_text())
    row = report["rows"][-1]
    row["ms"] = {"121": 123_450.0, "313": 456_780.0}
    row["psnr_db"] = dict.fromkeys(row["psnr_db"], 12.3)
    report["rows"].append(row | {"name": "broken", "ms": {}, "psnr_db": {}, "problem": "RuntimeError: no"})
    file.write_text(json.dumps(report))
    assert "12.3 | 12.3" in tables.rewritten(text("accuracy.md"), tmp_path)
    page = tables.rewritten(text("performance.md"), tmp_path)
    for words in ("123.45", "456.78", "313 frames: s", "RuntimeError: no"):
        assert words in page
    assert page.count("\n## ") == text("performance.md").count("\n## ")


def test_results_that_are_not_there_are_said_to_be_missing(tables, tmp_path):
    for name, table in tables.TABLES.items():
        assert "No result is committed yet" in table(tmp_path), name


def test_results_of_the_other_benchmarks(tables, tmp_path):
    common = {"device": "card", "date": "2026-01-02", "versions": {"torch": "2"}, "size": "704x1248"}
    common |= {"backend": "cuda", "dtype": "float16"}
    memory = common | {"frames": [17, 313], "rows": [{"mode": "stream", "peak_gib": [7.04, 7.11]}]}
    (tmp_path / "stream_memory.json").write_text(json.dumps(memory))
    (tmp_path / "stream_memory.png").touch()
    assert "| stream | 7.0 | 7.1 |" in tables.stream_memory(tmp_path)
    assert "(../benchmarks/results/stream_memory.png)" in tables.stream_memory(tmp_path)
    levels = common | {
        "rows": [{"columns": {"1": 3, "3": 4}, "float_products": [1], "psnr_db": {"branches": 70.21}, "ms": 1494}]
    }
    (tmp_path / "winograd_levels.json").write_text(json.dumps(levels))
    assert "| 4x3 at 1, 4x4 at 3; products float32 at 1 | 70.2 | 1.49 |" in tables.winograd_levels(tmp_path)
    row = {"name": "matmul", "ms": 1.7, "joules": 1.1, "watts": 690.4, "mhz": 1410, "flops": 1e12, "nbytes": 0}
    rows = [row, row | {"name": "copy", "flops": 0, "nbytes": 1e10}, row | {"name": "decode", "flops": 0}]
    (tmp_path / "energy.json").write_text(json.dumps(common | {"limit_watts": 700, "rows": rows}))
    page = tables.energy(tmp_path)
    assert "Power limit 700 W" in page
    assert (
        "| `matmul` | 1.70 | 690 | 1410 | 1.1 | 1.10 pJ/FLOP |\n| `copy` | 1.70 | 690 | 1410 | 1.1 | 110 pJ/byte |"
        in page
    )
    assert page.endswith("| 1.1 | - |")
    clip = {"one_rank_ms": 2000, "ms": 500, "peak_gib": [3.0, 4.0], "sent_bytes": {"halo": [0, 2**20]}, "psnr_db": 95}
    runs = {f"run {world}": common | {"decoder_width": 256, "world": world, "clips": {"121": clip}} for world in (4, 2)}
    (tmp_path / "decode_parallel.json").write_text(json.dumps(runs))
    assert "| 2 | 121 | 0.50 | 4.00 | 4.0 | 1 | 0 | 0 | 95.0 |\n| 4 |" in tables.decode_parallel(tmp_path)


def test_errors_of_the_points_are_those_of_the_study():
    source = (ROOT / "tests" / "kernels" / "test_winograd.py").read_text()
    study = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "test_errors_are_those_of_the_study"
    )
    rows = study.decorator_list[0].args[1].elts
    page = text("accuracy.md").split("## Points of Winograd's transforms")[1]
    quoted = [line.split(" | ")[-2:] for line in page.split("\n## ")[0].splitlines() if line.startswith("| F(")]
    quoted = [tuple(float(cell.strip(" |")) for cell in cells) for cells in quoted]
    assert quoted == [tuple(ast.literal_eval(value) for value in row.elts[-2:]) for row in rows]
