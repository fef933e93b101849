"""`zk plan`: its bytes are those of real optimizers, its models the published ones, its advice holds."""

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zk
from zk.tools.cli import app
from zk.tools.gpt import GPT, GPTConfig
from zk.tools.plan import GIB, Machine, Plan, deepspeed_nbytes, model_of, sizes_of

ROOT = Path(__file__).parent.parent
TIERS = ("device", "host", "nvme")
WIDE = GPTConfig(vocab=512, width=256, layers=6, heads=4, context=32)


def zk_plan(command: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, ["plan", *shlex.split(command)])
    assert done.exit_code == exit_code, done.output
    return done.output


def as_json(command: str, exit_code: int = 0) -> dict[str, Any]:
    return json.loads(zk_plan(f"{command} --json", exit_code))  # type: ignore[no-any-return]


def plan_of(model: nn.Module, gpu: int | None = GIB, **options: Any) -> Plan:
    fields = {"ram_nbytes": 128 * GIB, "nvme_nbytes": 1024 * GIB, **options.pop("machine", {})}
    return Plan(name="", model=model, machine=Machine(gpu_nbytes=gpu, **fields), **options)


# stage, parameters, optimizer, other options
REAL: list[tuple[int, str, str, dict[str, Any]]] = [
    (3, "host", "device", {"dtype": "fp32", "state_dtype": "8bit"}),
    (0, "device", "nvme", {"dtype": "bf16", "state_dtype": "bf16"}),
    (3, "nvme", "nvme", {"dtype": "bf16"}),
]


@pytest.mark.parametrize(("stage", "param_tier", "optimizer_tier", "options"), REAL)
def test_bytes_are_those_of_the_chunks_of_a_real_optimizer(
    stage: int, param_tier: Any, optimizer_tier: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {"param_tier": param_tier, "optimizer_tier": optimizer_tier}
    tiers |= {"nvme_path": tmp_path} if "nvme" in tiers.values() else {}
    config = zk.ZeroConfig(stage=stage, **tiers, **options)
    with torch.device("meta"):
        planned = plan_of(GPT(WIDE), None, tokens=0, state_dtype=options.get("state_dtype", "fp32")).row(config)
    model = GPT(WIDE)
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), config) as optimizer:
        real, told = Counter[str](), optimizer.metrics()
        for chunk in [chunk for store in optimizer._runtime.stores for chunk in (store.param, *store.states)]:
            for name, field in chunk.open().items():
                real[name if name in ("param", "master") else "moments"] += field.nbytes
            chunk.close(changed=False)
    for kind in ("param", "master", "moments"):
        of_plan = sum(planned.sizes[memory, kind] for memory in TIERS)
        of_metrics = sum(told.get(f"{memory}_{kind}_nbytes", 0) for memory in TIERS)
        assert real[kind] == of_plan == of_metrics, kind


PUBLISHED = {
    "llama:8b": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
}


def test_models_have_their_published_number_of_parameters() -> None:
    assert {name: sizes_of(model_of(name))["numel"] for name in PUBLISHED} == pytest.approx(PUBLISHED, rel=2e-4)


def test_a_config_json_and_a_factory_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    transformers.LlamaConfig(vocab_size=128256, **sizes).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert sizes_of(model_of(str(path))) == pytest.approx(sizes_of(model_of("llama:8b")), rel=2e-4)
    code = "import torch\ndef build(): return torch.nn.Linear(8, 4)\ndef needs(size): ...\ndef fails(): 1 / 0\ndef three(): return 3"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert sizes_of(model_of("mine:build"))["numel"] == 36
    said = {"needs": "missing 1 required", "fails": "ZeroDivisionError", "three": "it returned 3", "nothere": "no attribute 'nothere'"}
    for name, words in said.items():
        error = zk_plan(f"mine:{name}", 2)
        assert f"No model can be made of 'mine:{name}'" in error and words in error
        assert "a function without arguments that returns an nn.Module" in error and error.count("\n") == 1
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"No model can be made of .*model_type"):
        model_of(str(tmp_path))


def test_errors_name_the_option() -> None:
    for command, words in (
        ("gpt:1b --gpu 4090MiB --ram 1", "a string with a unit: '24GiB'; got '1'"),
        ("gpt:1b --gpu b200", "--gpu must be 24GiB, none or one of 3090, 4090,"),
        ("gpt:1b --ram lots", "--ram must be"),
        ("gpt:1b --state-dtype int3", "state_dtype must be"),
        ("gpt:1b --dtype fp16 --state-dtype 8bit", "fp16 has no 24-bit master"),
        ("gpt:1b --dtype int8", "dtype must be one of"),
        ("nowhere:build", "No model can be made of 'nowhere:build'"),
        ("llama:9b", "or one of llama3:8b"),
        ("gpt:1000000b", "at most 20,000b parameters"),
    ):
        assert words in zk_plan(command, 2), command


def test_ranks_share_what_a_stage_partitions_and_deepspeed_says_what_its_page_says() -> None:
    """Of 2,851M parameters on 8 GPUs: 5.31 GiB of each GPU and 127.48 of the host at stage 2."""
    with torch.device("meta"):
        plan = plan_of(nn.Linear(2851, 1_000_000, bias=False), 32 * GIB, machine={"world": 8})
    gpu, host = deepspeed_nbytes(plan, zk.ZeroConfig(stage=2, optimizer_tier="host"))
    assert (gpu / GIB, host / GIB) == (pytest.approx(5.31, abs=0.01), pytest.approx(127.48, abs=0.1))
    rows = as_json("llama:8b --gpu 80GiB --ram 512GiB --world 8 --tokens 4096")["rows"]
    found = {row["config"]["stage"]: row["device_moments_nbytes"] for row in rows if "optimizer_tier" not in row["config"]}
    assert found[0] == pytest.approx(8 * found[1], rel=1e-3) and found[1] == found[2] == found[3]


def test_8b_on_a_card_of_24_gib_fits_with_as_many_tokens_as_it_says() -> None:
    command = "llama:8b --gpu 24GiB --ram 128GiB"
    said, best = zk_plan(command), as_json(command)["best"]
    assert all(len(line) <= 80 for line in said.splitlines())
    assert best["config"]["optimizer_tier"] == "host" and not best["missing"]
    most = best["most_tokens"]
    assert 4096 < most < 8192 and f"3*    host   host         14.9   104.7       - yes, up to {most:,} tokens" in said
    for tokens, exit_code in ((most, 0), (most + 1, 1)):
        assert as_json(f"{command} --tokens {tokens}", exit_code)["best"]["most_tokens"] == most


def test_what_is_printed_runs_as_python() -> None:
    command = "llama:8b --gpu 40GiB --ram 96GiB --nvme 1TiB"
    said, best = zk_plan(command), as_json(command)["best"]["config"]
    assert best["overlap_step"] is True and best["device_budget"] == "21GiB" and best["nvme_path"]
    made: list[zk.ZeroConfig] = []
    call = {"ZeroOptimizer": lambda *args, **fields: made.append(zk.ZeroConfig(**fields))}
    names: dict[str, Any] = {"torch": torch, "model": nn.Linear(2, 2), "zk": type("", (), call)}
    exec(said[said.index("zero = {") : said.index("For ZeroTrainer(zero=zero)")], names)
    exec(said[said.index("adamw = ") : said.index("\n\nDeepSpeed")], names)
    assert names["zero"] == best and made == [zk.ZeroConfig(**best)]


@pytest.mark.parametrize(
    ("command", "lacks", "options"),
    [
        ("llama:8b --gpu 24GiB --ram 128GiB --tokens 8192", "1.7 GiB of GPU memory", {"--tokens", "--gpu"}),
        ("gpt:10b --gpu 24GiB --ram 16GiB --nvme 10GiB", "120.0 GiB of drive memory", {"--nvme"}),
        ("gpt:1b --gpu 3GiB --ram 14GiB --dtype fp16", "GiB of host memory", {"--state-dtype"}),
    ],
)
def test_where_nothing_fits_each_change_that_is_named_does(command: str, lacks: str, options: set[str]) -> None:
    said = zk_plan(command, 1)
    assert "lacks" in said and lacks in said and "Recommended" not in said
    changes = re.findall(r"^  (--[a-z-]+) (\S+)$", said, re.MULTILINE)
    assert options <= {option for option, _ in changes}
    for option, value in changes:
        kept = re.sub(rf" {option} \S+", "", command)
        assert as_json(f"{kept} {option} {value}")["best"]["missing"] == {}


def test_the_guide_shows_what_the_command_prints() -> None:
    guide = (ROOT / "docs" / "guides" / "will_it_fit.md").read_text()
    shown = re.findall(r"^```\n(?:zk|python -m zk) plan ([^\n]*)\n```\n\n```text\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(shown) >= 2
    for command, output in shown:
        printed = zk_plan(command, int("Nothing fits" in output))
        assert all(part in printed for part in output.split("...\n")), printed
