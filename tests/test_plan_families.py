"""Models by the names that people type, and what a plan says in few rows."""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.test_plan import machine
from zk.tools.plan import report
from zk.tools.plan.choose import faster, plan
from zk.tools.plan.families import KNOWN
from zk.tools.plan.shape import Shape, Units, shape_of

GIB = 2**30
# in 1e9, as their model cards say
SIZES = {
    **{"llama:1b": 1.236, "llama:3b": 3.213, "llama:8b": 8.030, "llama:70b": 70.55, "llama:405b": 405.9},
    **{"qwen3:0.6b": 0.596, "qwen3:1.7b": 1.72, "qwen3:4b": 4.02, "qwen3:8b": 8.19, "qwen3:14b": 14.77, "qwen3:32b": 32.76},
    **{"qwen3:30b-a3b": 30.5, "qwen3:235b-a22b": 235.1, "gpt-oss:20b": 20.9, "gpt-oss:120b": 116.8, "mistral:7b": 7.25, "mixtral:8x7b": 46.7},
}


def test_every_name_of_the_table_has_the_size_that_it_says() -> None:
    assert set(KNOWN.split(", ")) == set(SIZES)
    for name, billions in SIZES.items():
        assert shape_of(name).num_params == pytest.approx(billions * 1e9, rel=5e-3), name
    assert shape_of("Llama:8B").name == "Llama:8B"
    assert shape_of("gpt-oss:20b").num_active == pytest.approx(4.2e9, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "message"),
    (
        ("llama:7b", "there is llama:1b, llama:3b, llama:8b, llama:70b, llama:405b; got 'llama:7b'. Of another size give its config.json"),
        ("qwen3", "there is qwen3:0.6b"),
        ("meta-llama/Llama-9", "the local cache of Hugging Face has none of that name"),
        ("../etc/passwd", "a model is gpt:SIZE"),
    ),
)
def test_a_name_that_is_not_known_is_an_error_that_says_what_is(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shape_of(spec)


def test_a_name_of_the_hub_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99}
    folder = tmp_path / "hub" / "models--org--tiny-1.5"
    for number, layers in (("old", 2), ("new", 3)):
        (folder / "snapshots" / number).mkdir(parents=True)
        (folder / "snapshots" / number / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("old\n")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = shape_of("org/tiny-1.5")
    assert found.name == "org/tiny-1.5" and found.layers == 2
    (folder / "refs" / "main").unlink()
    assert shape_of("org/tiny-1.5").layers in (2, 3)


@functools.cache
def printed(spec: str, **options: Any) -> tuple[str, Any]:
    file, found = io.StringIO(), plan(shape_of(spec), machine(**options), 2048)
    report.print_plan(Console(file=file, width=140), found)
    return file.getvalue(), found


def test_rows_that_are_the_same_are_one_and_the_best_is_marked() -> None:
    text, found = printed("llama:8b", gpu_nbytes=80 * GIB, ram_nbytes=256 * GIB)
    rows = [line for line in text.split("largest model")[0].splitlines() if re.match(r"^[\d,*-]+ +(device|host|nvme|auto) ", line)]
    assert len(rows) < len(found.options) and re.match(r"0-3 +device +device ", rows[0])
    cells = [row.split()[1:] for row in rows]
    assert len(set(map(tuple, cells))) == len(cells)
    (marked,) = [row for row in rows if "*" in row.split()[0]]
    assert f" {found.best.config.param_tier}" in marked and f" {found.best.config.optimizer_tier}" in marked
    stages = [row.split()[0].replace("*", "") for row in rows]
    assert sum(len(stage.split(",")) if "-" not in stage else int(stage[2]) - int(stage[0]) + 1 for stage in stages) == len(found.options)


def test_it_says_what_would_make_a_step_shorter_and_that_is_so() -> None:
    text, found = printed("llama:8b", gpu_nbytes=40 * GIB, ram_nbytes=64 * GIB)
    helps = faster(found)
    assert found.best.step.bound == "disk" and set(helps) == {'state_dtype="bf16"', "64 GiB more RAM", "a drive twice as fast"}
    assert re.search(r'faster: state_dtype="bf16" \([\d.]+ s\), or 64 GiB more RAM \([\d.]+ s\), or a drive twice as fast \([\d.]+ s\)', text)
    more = plan(found.shape, machine(gpu_nbytes=40 * GIB, ram_nbytes=128 * GIB), 2048)
    assert more.best is not None and more.best.step.seconds == helps["64 GiB more RAM"]


def test_the_estimate_of_deepspeed_is_that_of_its_documentation() -> None:
    units = (Units((32_000_000,), 89), Units((3_000_000,), 1, rest=True))  # its example: t5-3b, 2,851M parameters, the largest layer of 32M
    found = plan(Shape("t5-3b", units, 1024, 4096, 32_128), machine(world=8, per_machine=8, gpu_nbytes=80 * GIB, ram_nbytes=500 * GIB), 2048)
    choices = {(one.config.stage, one.config.param_tier, one.config.optimizer_tier): one for one in found.options}

    def estimated(*choice: Any) -> tuple[float, float] | None:
        nbytes = report.deepspeed_nbytes(found, choices[choice])
        return None if nbytes is None else (round(nbytes[0] / GIB, 2), round(nbytes[1] / GIB, 2))

    assert estimated(3, "host", "host") == (0.12, 71.69) and estimated(3, "device", "host") == (0.78, 63.72)
    assert estimated(3, "device", "device") == (6.09, 1.43) and estimated(2, "device", "host") == (5.31, 127.45)
    text, _ = printed("llama:8b", gpu_nbytes=40 * GIB, ram_nbytes=64 * GIB)
    assert re.search(r"DeepSpeed's estimator for this offloading: [\d.]+ GiB per GPU, [\d.]+ GiB per CPU", text)
    assert "DeepSpeed" not in printed("llama:1b", gpu_nbytes=None, ram_nbytes=64 * GIB)[0]


def test_it_says_what_is_missing_where_nothing_fits() -> None:
    text, found = printed("llama:70b", gpu_nbytes=16 * GIB, ram_nbytes=32 * GIB, nvme_nbytes=0)
    assert found.best is None
    assert re.search(r"The least is missing at stage 3, parameters on \w+, optimizer on \w+: .* GiB more of host", text)
