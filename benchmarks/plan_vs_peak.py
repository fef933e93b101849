"""What `zk plan` says a run needs against what real runs need: the peak of their memory, and their file on the drive.

usage: python benchmarks/plan_vs_peak.py [--folder runs/nvme] [--only N ...] [--out FILE.md]      `make bench-plan`
Each combination trains three steps of a model in a process of its own, from deferred initialization, so that nothing but zk holds
memory. Peak is the high-water mark of the resident set, beyond that of the same run of a tiny model in the same process just before.
Activations are a few KiB: one token. There is no GPU in it, so that device and host are one memory. ``check`` is what ZeroOptimizer
would refuse below: it must not be more than the peak.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zk
from zk.core import fit
from zk.core.memory import peak_nbytes, trim
from zk.tools.plan.adapters import adapted
from zk.tools.plan.choose import footprint
from zk.tools.plan.shape import Shape, shape_of, shape_of_module
from zk.tools.plan.speed import Machine

MIB = 1 << 20
ROOT = Path(__file__).parent.parent
# width and blocks: 50M, 101M, 151M parameters
SIZES = {"50M": (1024, 24), "101M": (2048, 12), "151M": (2048, 18)}
# stage, parameters, optimizer, size, other options
COMBINATIONS: list[tuple[int, str, str, str, dict[str, Any]]] = [
    (0, "device", "device", "50M", {"dtype": "bf16"}),
    (1, "device", "host", "101M", {"dtype": "bf16"}),
    (2, "device", "host", "151M", {"dtype": "bf16"}),
    (2, "device", "device", "50M", {"dtype": "fp32"}),
    (3, "host", "host", "101M", {"dtype": "bf16"}),
    (3, "host", "host", "50M", {"dtype": "fp16"}),
    (3, "host", "host", "151M", {"dtype": "bf16", "state_dtype": "bf16"}),
    (0, "device", "nvme", "151M", {"dtype": "bf16"}),
    (2, "device", "nvme", "101M", {"dtype": "bf16"}),
    (3, "host", "nvme", "151M", {"dtype": "bf16"}),
    (3, "nvme", "host", "101M", {"dtype": "bf16"}),
    (3, "nvme", "nvme", "151M", {"dtype": "bf16"}),
    (3, "nvme", "nvme", "101M", {"dtype": "bf16", "prefetch": 0}),
]
# stage, parameters, optimizer, base as in tests.test_plan_adapters
ADAPTERS = [
    (3, "host", "host", "nf4"),
    (3, "nvme", "nvme", "nf4"),
    (3, "nvme", "nvme", "nf4, scales not quantized"),
    (3, "nvme", "nvme", "int8"),
    (3, "nvme", "nvme", "fp8"),
]
RANK = 16
LLAMA = {"intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 2048}


class Block(nn.Module):
    """Two square layers that touch all their weights for one token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(width: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def train(width: int, blocks: int, options: dict[str, Any]) -> tuple[int, int]:
    """Three steps; what the check found to be needed at least, and the bytes of the file on the drive."""
    needed: list[int] = []

    def look(need: dict[str, int], _free: dict[str, int]) -> dict[str, int]:
        needed.append(need["host"])
        return {}

    with zk.deferred_init():
        model = build(width, blocks)
    with mock.patch.object(fit, "lacking", look), zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as optimizer:
        nvme = optimizer.tiers.get("nvme")
        file_nbytes = nvme.spill.nbytes if nvme is not None else 0  # type: ignore[union-attr]
        for _ in range(3):
            optimizer.backward(model(torch.randn(1, width)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return needed[0], file_nbytes


def planned(width: int, blocks: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of host memory and of the drive, by `zk plan`."""
    with zk.deferred_init():
        shape: Shape = shape_of_module(build(width, blocks), "squares")
    machine = Machine(gpu_nbytes=None, ram_nbytes=1 << 40, nvme_nbytes=1 << 40)
    found = footprint(shape, zk.ZeroConfig(**options), machine)
    return found.on("host"), found.on("nvme")


def measure(number: int, folder: str) -> None:
    """In a process of its own: print what was planned, found and taken."""
    stage, param_tier, optimizer_tier, size, rest = COMBINATIONS[number]
    options = {"stage": stage, "param_tier": param_tier, "optimizer_tier": optimizer_tier, **rest}
    if "nvme" in (param_tier, optimizer_tier):
        options["nvme_path"] = folder
    torch.set_num_threads(1)
    train(32, 4, options)
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    before = peak_nbytes()
    least, file_nbytes = train(*SIZES[size], options)
    took = peak_nbytes() - before
    plan, drive = planned(*SIZES[size], options)
    num_params = sum(p.numel() for p in build(*SIZES[size]).parameters())
    found = {"plan": plan, "peak": took, "least": least, "drive": drive, "file": file_nbytes, "params": num_params}
    print("RESULT " + json.dumps(found))


def llama(folder: Path, base: str, width: int, layers: int) -> nn.Module:
    """A model of published weights, which are written once, as transformers quantizes it, with adapters."""
    import peft
    import transformers

    published = folder / f"llama-{width}-{layers}"
    if not (published / "config.json").exists():
        config = transformers.LlamaConfig(hidden_size=width, num_hidden_layers=layers, dtype="bfloat16", **LLAMA)
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(published)
    if base.startswith("nf4"):
        double = base == "nf4"
        how = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.bfloat16
        )
    else:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        how = transformers.TorchAoConfig(Int8WeightOnlyConfig() if base == "int8" else Float8WeightOnlyConfig())
    model = transformers.LlamaForCausalLM.from_pretrained(published, quantization_config=how, device_map="cpu", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # as plans take it
    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear")).train()  # type: ignore[no-any-return]


def digest(folder: Path) -> str:
    """Of all files in it."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def adapt(model: nn.Module, options: dict[str, Any], folder: Path) -> tuple[int, int, float]:
    """Three steps: bytes of the file on the drive, the peak, and the bytes of a checkpoint without the base for each of master and moments."""
    with zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), **options) as optimizer:
        nvme = optimizer.tiers.get("nvme")
        file_nbytes = nvme.spill.nbytes if nvme is not None else 0  # type: ignore[union-attr]
        trim()
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(3):
            ids = torch.randint(0, LLAMA["vocab_size"], (1, 2))
            optimizer.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        took = peak_nbytes()
        saved = optimizer.save_checkpoint(folder / "saved", frozen=False)
        assert saved is not None
        nbytes = sum(path.stat().st_size for path in saved.iterdir())
        shutil.rmtree(folder / "saved")
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return file_nbytes, took, nbytes / (3 * 4 * trained)


def measure_adapters(number: int, folder: Path) -> None:
    """As ``measure``."""
    stage, param_tier, optimizer_tier, base = ADAPTERS[number]
    options: dict[str, Any] = {"stage": stage, "param_tier": param_tier, "optimizer_tier": optimizer_tier, "dtype": "bf16"}
    if "nvme" in (param_tier, optimizer_tier):
        options["nvme_path"] = folder
    torch.set_num_threads(1)
    adapt(llama(folder, base, 256, 2), options, folder)
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_nbytes()
    model = llama(folder, base, 2048, 12)
    published = folder / "llama-2048-12"
    was = digest(published)
    file_nbytes, took, share = adapt(model, options, folder)
    model.config.save_pretrained(folder / "quantized")
    shape = adapted(shape_of(str(folder / "quantized")), f"rank={RANK}", None)
    found = footprint(shape, zk.ZeroConfig(**options), Machine(gpu_nbytes=None, ram_nbytes=1 << 40, nvme_nbytes=1 << 40))
    said = {"plan": found.on("host"), "peak": took - before, "drive": found.on("nvme"), "file": file_nbytes, "params": shape.num_params}
    print("RESULT " + json.dumps({**said, "trained": shape.num_trained, "share": share, "unchanged": digest(published) == was}))


def adapters_row(number: int, found: dict[str, Any]) -> str:
    stage, param_tier, optimizer_tier, base = ADAPTERS[number]
    plan, peak = found["plan"], found["peak"]
    said = f"{found['drive'] / MIB:.0f} / {found['file'] / MIB:.0f}" if found["file"] else "-"
    return (
        f"| {stage} | {param_tier} | {optimizer_tier} | {base} | {found['trained'] / 1e6:.1f}M of {found['params'] / 1e6:.0f}M | {plan / MIB:.0f} "
        f"| {peak / MIB:.0f} | {plan / peak:.3f} | {said} | {found['share']:.3f} | {'yes' if found['unchanged'] else 'NO'} |"
    )


def row(number: int, found: dict[str, int]) -> str:
    stage, param_tier, optimizer_tier, _, rest = COMBINATIONS[number]
    options = ", ".join(f"{name}={value}" for name, value in rest.items())
    plan, peak = found["plan"], found["peak"]
    said = f"{found['drive'] / MIB:.0f} / {found['file'] / MIB:.0f}" if found["file"] else "-"
    return (
        f"| {stage} | {param_tier} | {optimizer_tier} | {found['params'] / 1e6:.0f}M | {options} | {plan / MIB:.0f} | {peak / MIB:.0f} "
        f"| {plan / peak:.3f} | {found['least'] / peak:.3f} | {said} |"
    )


def run(measurement: str, number: int, folder: Path) -> dict[str, Any]:
    """One combination, in a process of its own. What that frees goes back to the system at once: transformers frees a whole model in pieces."""
    command = [sys.executable, __file__, "--folder", str(folder), measurement, str(number)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{measurement} {number}: the run ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(COMBINATIONS))))
    parser.add_argument("--adapters", type=int, nargs="*", default=list(range(len(ADAPTERS))))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure-adapters", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, str(options.folder))
        return
    if options.measure_adapters is not None:
        measure_adapters(options.measure_adapters, options.folder)
        return
    rows, adapters_rows, off = [], [], []
    for number in options.only:
        found = run("--measure", number, options.folder)
        rows.append(row(number, found))
        print(rows[-1], file=sys.stderr, flush=True)
        if abs(found["plan"] / found["peak"] - 1) > 0.1 or found["least"] > found["peak"] or found["drive"] != found["file"]:
            off.append(f"{number}")
    for number in options.adapters:
        found = run("--measure-adapters", number, options.folder)
        adapters_rows.append(adapters_row(number, found))
        print(adapters_rows[-1], file=sys.stderr, flush=True)
        is_near = abs(found["plan"] / found["peak"] - 1) <= 0.1 and found["drive"] == found["file"]
        if not (is_near and found["share"] <= 1.2 and found["unchanged"]):
            off.append(f"adapters {number}")
    where = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU, torch {torch.__version__}"
    count = len(rows) + len(adapters_rows)
    text = (
        f"# What `zk plan` says against the peak of real runs, {datetime.date.today()}\n\n"
        f"{where}. Peak: high-water mark of the resident set beyond a tiny model's, MiB. Command: `make bench-plan`\n\n"
        f"Of {count} combinations {count - len(off)} are within 10%, with a file on the drive of the size that was planned.\n\n"
    )
    if rows:
        text += (
            "Three steps of a model of square layers in a process of its own, one token. The check asks for no more than the peak.\n\n"
            "| stage | parameters | optimizer | size | options | plan | peak | plan / peak | check / peak | drive: plan / file |\n"
            "|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        )
    if adapters_rows:
        text += (
            f"Three steps of LoRA (rank {RANK}, all linear layers) over a Llama that transformers quantized, in `dtype=\"bf16\"`, two tokens, "
            "checkpointed. The peak is that of the steps: transformers has the model in memory before. Checkpoint: bytes with `frozen=False` for "
            "each byte of master and moments in fp32.\n\n"
            "| stage | parameters | optimizer | base | trained | plan | peak | plan / peak | drive: plan / file | checkpoint | base unchanged |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(adapters_rows) + "\n"
        )
    print(text)
    if options.out:
        options.out.write_text(text)
    if off:
        sys.exit(f"combinations that are off: {off}")


if __name__ == "__main__":
    main()
