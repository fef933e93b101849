"""In: DeepSpeed. Out: what it saves of a tiny model after three steps on two ranks, and what is in it, for tests that do without DeepSpeed.

    python -m tests.data.deepspeed.make [NAME ...]

The checkpoints are DeepSpeed's own, from ``engine.save_checkpoint``, but for the copies of its scripts, which are removed. Beside each one,
``expected.safetensors`` has the weights in fp32 (by name), the moments (``exp_avg/NAME``, ``exp_avg_sq/NAME``), as DeepSpeed itself gives them;
``expected.json`` has the numbers that are not tensors. Made with DeepSpeed 0.19.8 and torch 2.13 on a CPU over gloo.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.world import run_world

HERE = Path(__file__).parent
WORLD, STEPS = 2, 3
VOCAB, WIDTH, HIDDEN = 11, 8, 13  # odd sizes, so that no rank's part ends where a parameter does
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}},  # overflows at first
}
STAGES: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {"sub_group_size": 60, "stage3_param_persistence_threshold": 20}}
CASES: dict[str, dict[str, Any]] = {
    f"zero{stage}-{precision}": {**config, "zero_optimization": {"stage": stage, **zero}}
    for stage, zero in STAGES.items()
    for precision, config in PRECISIONS.items()
}
# here DeepSpeed takes its BF16_Optimizer, which saves the same under other keys
CASES["zero1-bf16-fp32-grads"] = {**CASES["zero1-bf16"], "data_types": {"grad_accum_dtype": "fp32"}}

# parameters in another order than in the groups
CASES["zero2-fp32-round-robin"] = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}

# DeepSpeed's own Adam, which counts steps and names options in its own way
OWN_ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.0}}
for number in (2, 3):
    zero = {**CASES[f"zero{number}-bf16"]["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    CASES[f"zero{number}-bf16-own-adam"] = {**CASES[f"zero{number}-bf16"], "zero_optimization": zero, "optimizer": OWN_ADAM}


class Tiny(nn.Module):
    """Two linear layers between an embedding and a head that are tied, with a norm, a frozen scale and two buffers, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH + 1), requires_grad=False)
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.scale[1:]
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).float().reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def batch(seed: int) -> Tensor:
    """(3, 6) token ids."""
    return torch.randint(0, VOCAB, (3, 6), generator=torch.Generator().manual_seed(seed))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own; the first one has the frozen parameter, which DeepSpeed leaves out."""
    matrices = [param for name, param in model.named_parameters() if param.ndim > 1 or name == "scale"]
    vectors = [param for name, param in model.named_parameters() if param.ndim < 2 and name != "scale"]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]


def adamw_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.0)


def save_one(case: tuple[str, str, int]) -> None:
    """Train on this rank and save; the first rank adds what is expected."""
    name, folder, port = case
    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it says no for every CPU, and the files are the same
    torch.manual_seed(0)
    model = Tiny()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **CASES[name],
    }
    mine = {"model_parameters": groups_of(model)} if "optimizer" in config else {"optimizer": adamw_of(model)}
    engine, *_ = deepspeed.initialize(model=model, config=config, **mine)
    while engine.global_steps - engine.skipped_steps < STEPS:
        with torch.no_grad():
            model.seen += 1
        engine.backward(loss_of(engine, batch(WORLD * engine.global_steps + rank)))
        engine.step()
    engine.save_checkpoint(folder)
    found = from_flat(engine, model) if "round-robin" in name else from_params(engine, model)
    with deepspeed.zero.GatheredParameters([model.scale], enabled=engine.zero_optimization_stage() == 3):
        found["scale"] = model.scale.detach().float().clone()
    if rank:
        return
    found["seen"] = model.seen.float().clone()
    save_file(found, Path(folder) / "expected.safetensors")
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    numbers = {"steps": engine.global_steps - engine.skipped_steps, "skipped_steps": engine.skipped_steps, "scale": getattr(scaler, "cur_scale", 1.0)}
    (Path(folder) / "expected.json").write_text(json.dumps(numbers) + "\n")


def from_params(engine: Any, model: Tiny) -> dict[str, Tensor]:
    """Weights and moments, flattened, as DeepSpeed finds them for its users."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:  # it looks for states after the first group's first step, when the others have none yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, Tensor] = {}
    for key, param in model.named_parameters():
        if param.requires_grad:
            found[key] = safe_get_full_fp32_param(param)
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind}/{key}"] = safe_get_full_optimizer_state(param, kind)
    return {key: value.detach().float().reshape(-1).clone() for key, value in found.items()}


def from_flat(engine: Any, model: Tiny) -> dict[str, Tensor]:
    """The same from the flat buffers: where parameters go round robin, DeepSpeed looks for their state in places of others."""
    names = {param: key for key, param in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for number, mine in enumerate(engine.optimizer.single_partition_of_fp32_groups):
        state = engine.optimizer.optimizer.state[mine]
        for prefix, part in (("", mine), ("exp_avg/", state["exp_avg"]), ("exp_avg_sq/", state["exp_avg_sq"])):
            parts = [torch.empty_like(part) for _ in range(WORLD)]
            torch.distributed.all_gather(parts, part.detach())
            flat = torch.cat(parts)
            for param in engine.optimizer.round_robin_bit16_groups[number]:
                found[prefix + names[param]], flat = flat[: param.numel()].clone(), flat[param.numel() :]
    for key, param in model.named_parameters():
        assert not param.requires_grad or torch.equal(found[key], param.detach().reshape(-1)), key
    return found


def check(folder: Path, name: str) -> None:
    """DeepSpeed's own conversion agrees; it does not know frozen parameters at stage 1, nor BF16_Optimizer."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import load_file

    if name == "zero1-bf16-fp32-grads":
        return
    expected = load_file(folder / "expected.safetensors")
    for key, value in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items():
        want = expected["tokens.weight" if key == "head.weight" else key]
        assert torch.equal(value.float().reshape(-1), want.reshape(-1)), f"{name}: {key}"


def main(names: list[str]) -> None:
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            result = run_world(WORLD, save_one, [(name, scratch, free.getsockname()[1])], timeout=120)
            if any(isinstance(value, RuntimeError) for value in result[0]):
                raise SystemExit(f"{name}:\n{result[0][0]}\n{result[0][1]}")
            check(Path(scratch), name)
            for script in Path(scratch).glob("zero_to_*.py"):
                script.unlink()
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(scratch, HERE / name)
            print(name, sum(path.stat().st_size for path in (HERE / name).rglob("*.*")), "bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
