"""`zk train --model moe:`: the mixture beside a dense evaluation of it and beside plain torch, its sizes, and the bytes that it reports."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import zk
from tests.programs import Program, rank_of
from tests.test_train import last_loss
from tests.world import free_port
from zk.tools.cli import app
from zk.tools.train.gpt import GPTConfig
from zk.tools.train.mixture import BALANCE, Mixture, MixtureBlock, MixtureConfig
from zk.tools.train.record import Record, routed
from zk.tools.train.run import Job, adamw, train
from zk.tools.train.sizes import config_of, model_of

CONFIG = MixtureConfig(width=32, layers=2, heads=2, context=16, experts=16, used=2, inner=64)
SMALL = ["--model", "moe:width=32,layers=2,heads=2,context=16,experts=16,used=2,inner=64", "--batch", "1", "--sample", "8", "--lr", "1e-3"]
DRIVE: dict[str, Any] = {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"}


def make(config: GPTConfig = CONFIG) -> Mixture:
    torch.manual_seed(0)
    model = model_of(config)
    assert isinstance(model, Mixture)
    return model


def drawn(seed: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (batch, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def dense(block: MixtureBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    """All experts on all tokens, those of the largest shares weighted; and the balance: (batch, time, width) -> the same, and one number."""
    shares = F.softmax(block.router(x), dim=-1)  # (batch, time, experts)
    order = shares.argsort(dim=-1, descending=True)
    is_used = torch.zeros_like(shares).scatter(-1, order[..., : block.used], 1.0)
    weights = shares * is_used
    weights = weights / weights.sum(-1, keepdim=True)
    every = torch.stack([e.down(F.silu(e.gate(x)) * e.up(x)) for e in block.experts], dim=-1)  # type: ignore[operator, union-attr]
    balance = torch.zeros(())
    for expert in range(len(block.experts)):
        balance = balance + is_used[..., expert].mean() / block.used * shares[..., expert].mean()
    return (every * weights[..., None, :]).sum(-1), len(block.experts) * balance


@pytest.mark.parametrize("used", (1, 2, 16))
def test_loss_and_gradients_are_those_of_all_experts_with_weights(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(config_of(SMALL[1], 16, {"used": used}))
    for block in model.blocks:
        nn.init.normal_(block.router.weight, std=0.5)  # so that shares are far from each other, and from ties
    other = copy.deepcopy(model)
    ids, targets = drawn(0, batch=3)
    loss = model(ids, targets)
    loss.backward()

    balances = []

    def mlp(self: MixtureBlock, x: Tensor) -> Tensor:
        out, balance = dense(self, x)
        balances.append(balance)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(MixtureBlock, "mlp", mlp)
        want = F.cross_entropy(other(ids).flatten(0, 1), targets.flatten())
    assert balances[0].item() == pytest.approx(1) if used == 16 else 1.001 < balances[0] < 16
    assert model.eval()(ids, targets).item() == pytest.approx(want.item(), rel=1e-5)
    want = want + BALANCE * sum(balances)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5) and want > 5
    want.backward()
    assert model.load.sum(-1).tolist() == [3 * 16 * used] * 2
    for (name, param), value in zip(model.named_parameters(), other.parameters(), strict=True):
        _, layer, _, expert, *_ = (*name.split("."), "", "", "")
        assert value.grad is not None
        if expert.isdigit() and not model.load[int(layer), int(expert)]:
            assert param.grad is None and not value.grad.any()
        else:
            torch.testing.assert_close(param.grad, value.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_queries_share_keys_and_values_as_in_attention_that_repeats_them() -> None:
    model = make(config_of(SMALL[1], 16, {"heads": 4, "kv_heads": 2, "head_dim": 12}))
    block, x = model.blocks[0], torch.randn(2, 5, 32)
    with torch.no_grad():
        q, k, v = block.qkv(block.norm1(x)).split([48, 24, 24], dim=-1)
        q, k, v = (part.view(2, 5, -1, 12).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) / 12**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        y = x + block.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 48))
        torch.testing.assert_close(block(x), y + block.mlp(block.norm2(y)), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("torch_engine")
@pytest.mark.parametrize("options", (DRIVE, {"stage": 2, "optimizer_tier": "host", "overlap_step": True}))
def test_it_trains_as_in_plain_torch(options: dict[str, Any], tmp_path: Path) -> None:
    model, plain = make(), make()
    other = adamw(plain.parameters(), 1e-2)
    path = {"nvme_path": tmp_path} if options is DRIVE else {}
    with zk.ZeroOptimizer(model, adamw(model.parameters(), 1e-2), **options, **path) as optimizer:
        for step in range(5):
            for one, its in ((model, optimizer), (plain, other)):
                one(*drawn(step)).backward()
                its.step()
                its.zero_grad()
        optimizer.synchronize()
        with zk.gather(model.parameters()):
            assert [name for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True) if not torch.equal(got, want)] == []


# ---- bytes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "micro", "param", "update"),
    (
        (DRIVE, 3, 2, 2 + 2 + 8),  # bytes of each element for each pass, and beside the gradient for the update
        ({**DRIVE, "state_dtype": "bf16"}, 1, 2, 2 + 2 + 4),
        ({**DRIVE, "dtype": "fp32"}, 1, 4, 4 + 8),
        ({**DRIVE, "param_tier": "host"}, 1, 0, 2 + 8),
    ),
)
def test_bytes_that_are_reported_are_counted_by_the_optimizer(
    options: dict[str, Any], micro: int, param: int, update: int, tmp_path: Path
) -> None:
    """Those needed are also counted unit by unit, from the experts that were called; and little else is fetched."""
    model, record = make(), Record()
    grad = 4 if micro > 1 or options.get("dtype") == "fp32" else 2
    with zk.ZeroOptimizer(model, adamw(model.parameters(), 1e-3), **{"dtype": "bf16", **options}, nvme_path=tmp_path) as optimizer:
        calls: dict[str, int] = {}

        def count(name: str) -> Any:
            return lambda *_: calls.update({name: calls.get(name, 0) + 1})

        for name, module in model.named_modules():
            if re.fullmatch(r"blocks\.\d\.experts\.\d+", name):
                module.register_forward_hook(count(name))
        for step in range(4):
            calls.clear()
            before = optimizer.metrics()["fetched_nbytes"]
            with routed(model, optimizer, record):
                for number in range(micro):
                    optimizer.backward(model(*(part[:, : 6 // micro] for part in drawn(10 * step + number))))  # few, so that some experts rest
                optimizer.step()
                optimizer.zero_grad()
            after, found = optimizer.metrics()["fetched_nbytes"], record.routing[-1]
            assert found.fetched_nbytes == after - before > 0
            units = [store.unit for store in optimizer.held]
            passes = [(unit.numel, calls.get(unit.name, 0 if "experts" in unit.name else micro)) for unit in units]
            assert found.experts == len(calls) / 2 and found.numel == sum(numel for numel, times in passes if times)
            needed = sum(numel * ((2 * param + grad) * times + update * (times > 0)) for numel, times in passes)
            assert found.needed_nbytes == pytest.approx(needed, rel=0.01)  # padding
        fetched, wanted = (sum(getattr(step, name) for step in record.routing[1:]) for name in ("fetched_nbytes", "needed_nbytes"))
        assert 0.6 * wanted <= fetched <= 1.2 * wanted, (fetched, wanted)
        total = sum(param.numel() for param in model.parameters())
        assert all(step.numel < 0.9 * total for step in record.routing)


def printed(output: str) -> tuple[float, float, float]:
    """Experts in use, bytes fetched in a step, times what is needed."""
    experts = re.search(r"experts +([\d.]+) of a layer in use in a step", output)
    moved = re.search(r"read in a step +([\d.]+) (MiB|bytes), ([\d.]+) times what these need", output)
    assert experts is not None and moved is not None, output
    return float(experts[1]), float(moved[1]) * {"MiB": 2**20, "bytes": 1}[moved[2]], float(moved[3])


def test_the_command_learns_resumes_and_prints_what_it_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = zk.ZeroConfig(dtype="bf16", nvme_path=tmp_path, clip_grad_norm=1.0, **DRIVE)
    job = Job(out=tmp_path / "out", model=CONFIG, steps=8, batch=1, sample=8, lr=1e-2, save_every=4, zero=zero)
    record = train(job)
    experts, nbytes, times = printed(capsys.readouterr().out)
    steps = record.routing[1:]
    assert len(record.routing) == 8 and record.valid[8] < record.valid[0] - 1
    fetched, needed = (sum(getattr(step, name) for step in steps) for name in ("fetched_nbytes", "needed_nbytes"))
    assert experts == pytest.approx(sum(step.experts for step in steps) / 7, abs=0.06)
    assert nbytes == pytest.approx(fetched / 7, abs=2**20 / 100) and times == pytest.approx(fetched / needed, abs=0.006)
    again = Job(**{name: getattr(job, name) for name in job.__dataclass_fields__} | {"resume": str(tmp_path / "out/checkpoints/step-00000004")})
    (tmp_path / "out/model.safetensors").unlink()
    resumed = train(again)
    assert resumed.losses == record.losses and len(resumed.routing) == 4 and resumed.valid[8] == record.valid[8]


def here(*options: str, ok: bool = True) -> str:
    """What `zk train` prints that runs in this process."""
    done = CliRunner().invoke(app, ["train", *SMALL, "--steps", "3", *options], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert (done.exit_code == 0) == ok, done.output
    return done.output


def test_it_says_the_experts_in_use_where_nothing_is_on_a_drive(tmp_path: Path) -> None:
    for options in (["--stage", "2"], ["--accumulate", "2", "--check", "--dtype", "fp32"]):
        shown = here("--out", str(tmp_path), *options)
        assert "Mixture, 0.22M parameters" in shown and "a token uses 2 of 16 experts in a layer, 0.05M parameters in all" in shown
        assert re.search(r"experts +\d+\.\d of a layer in use in a step", shown) and "read in a step" not in shown
    assert float(re.search(r"largest difference of any step (\S+)", shown)[1]) < 1e-4  # type: ignore[index]


def test_two_ranks_count_the_experts_of_both(tmp_path: Path) -> None:
    small, port = ["--model", SMALL[1].replace("experts=16", "experts=8"), "--sample", "1", "--steps", "2", "--dtype", "fp32"], free_port()
    drive = ["--param-tier", "nvme", "--optimizer-tier", "nvme", "--nvme-path", str(tmp_path)]
    ranks = [Program("-m", "zk", "train", *SMALL, *small, "--out", str(tmp_path / "two"), *drive, env=rank_of(2, rank, port)) for rank in range(2)]
    two, *_ = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], two
    one = here(*small, "--batch", "2", "--out", str(tmp_path / "one"), *drive)
    assert last_loss(tmp_path / "two") == pytest.approx(last_loss(tmp_path / "one"), abs=5e-3)
    assert printed(two)[0] == pytest.approx(printed(one)[0], abs=0.5)  # a share that is near another's may be smaller there


# ---- sizes -----------------------------------------------------------------------------------------------------------------------------


def test_options_replace_the_sizes_of_the_model() -> None:
    assert config_of("moe:layers=3,width=64", 128, {"layers": 2}) == MixtureConfig(layers=2, width=64, context=128)
    assert config_of("gpt:context=8", 128) == GPTConfig(context=8)
    assert MixtureConfig(width=64).inner == 24 and GPTConfig(width=64, heads=4).head_dim == 16
    known = config_of("moe:30B-A3B", 64)
    assert isinstance(known, MixtureConfig) and (known.experts, known.used, known.inner, known.vocab) == (128, 8, 768, 151936)


@pytest.mark.parametrize(
    ("model", "says"),
    (
        ("moe:many", "moe: takes a size (125m, 10b, 1t), 30b-a3b, or any of context, experts,"),
        ("moe:hidden=64", "=NUMBER; got 'hidden=64'"),
        ("moe:experts=4,used=8", "moe: used, the experts of a token, must be at most experts; got 8 and 4"),
        ("moe:heads=3,kv_heads=2,width=48", "moe: heads must be a multiple of kv_heads; got 3 and 2"),
        ("gpt:experts=8", "gpt: takes a size (125m, 10b, 1t), or any of context, head_dim,"),
        ("llama:7b", "a model is gpt:SIZE or moe:SIZE (gpt:10b, moe:100m), or sizes by name (moe:layers=8,width=256,experts=128); got 'llama:7b'"),
        ("moe:vocab=100,width=32", "zk train reads bytes, so vocab must be at least 256; got 100"),
    ),
)
def test_models_that_are_not_understood_are_refused_in_one_line(model: str, says: str) -> None:
    shown = here("--model", model, ok=False)
    assert says in shown and "Traceback" not in shown
