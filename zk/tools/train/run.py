"""The training loop of `python -m zk train`: an ordinary torch loop around a model that ZeroOptimizer holds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import zk
from zk.accumulation.schedule import is_vertical
from zk.core.options import check_order, parse_device, parse_dtype
from zk.core.precision import has_fast_products
from zk.core.timeline import phase
from zk.offload.tiers import readable
from zk.tools.metrics import Rates, reason_of
from zk.tools.train import report, resume
from zk.tools.train.data import Text, read_text
from zk.tools.train.gpt import GPT, GPTConfig
from zk.tools.train.mixture import MixtureConfig
from zk.tools.train.record import Record, routed
from zk.tools.train.sizes import model_of

Batch = tuple[Tensor, Tensor]  # inputs and targets


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Options of the command, as named there."""

    data: tuple[Path, ...] = ()
    out: Path = Path("runs/latest")
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    steps: int = 800
    batch: int = 16
    accumulate: int = 1
    accumulation: str = "auto"
    lr: float = 3e-3
    seed: int = 0
    sample: int = 240
    check: bool = False
    profile: bool = False
    save_every: int = 0  # steps; 0 for no checkpoints but the one at SIGTERM
    keep: int = 2
    resume: str | None = None  # "auto", or a folder
    zero: zk.ZeroConfig = dataclasses.field(
        default_factory=lambda: zk.ZeroConfig(stage=3, param_tier="host", optimizer_tier="host", clip_grad_norm=1.0)
    )


def fast_dtype(device: torch.device) -> str:
    """bf16 where the hardware multiplies it, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_bf16 and has_fast_products(torch.bfloat16) else "fp32"


def schedule(steps: int) -> Callable[[int], float]:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
    warmup = max(1, steps // 10)
    return lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))


def adamw(params: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW in which matrices decay and vectors do not."""
    members: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for param in params:
        members[0.1 if param.ndim >= 2 else 0.0].append(param)
    return torch.optim.AdamW([{"params": group, "weight_decay": decay} for decay, group in members.items()], lr=lr, betas=(0.9, 0.95))


class PlainTrainer:
    """The same training in plain torch, to compare losses with: fp32 masters that are rounded for each forward, AdamW."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, job: Job) -> None:
        self.model, self.dtype, self.clip = copy.deepcopy(model), dtype, job.zero.clip_grad_norm
        self.computes = job.zero.computes or dtype
        self.optimizer = adamw(self.model.parameters(), job.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule(job.steps))

    def step(self, batches: list[Batch]) -> float:
        """Train one step of these micro-batches; returns the loss."""
        total = 0.0
        for ids, targets in batches:
            rounded = {name: master.to(self.dtype).to(self.computes) for name, master in self.model.named_parameters()}
            loss = torch.func.functional_call(self.model, rounded, (ids, targets)) / len(batches)
            loss.backward()
            total += loss.item()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return total


def train(job: Job) -> Record:
    """Run the job on this rank; the first rank prints and writes files. Returns what it recorded."""
    check_order(job.accumulation, "--accumulation")
    if job.check and job.resume:
        raise ValueError("--check trains plain PyTorch from the first step on, and its state is in no checkpoint; leave out --check or --resume")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = parse_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(device)
    console = Console(quiet=rank != 0, highlight=False)
    if rank == 0:
        job.out.mkdir(parents=True, exist_ok=True)  # find out now that it cannot be written
    checkpoints = job.out / "checkpoints"
    found = resume.find(job.resume, checkpoints)
    if job.model.vocab < 256:
        raise ValueError(f"zk train reads bytes, so vocab must be at least 256; got {job.model.vocab}")
    raw = read_text(job.data)
    text = Text.of(raw, job.model.context)
    torch.manual_seed(job.seed)
    # a model for the drive is not built in memory first, unless plain PyTorch is to train it too
    deferred = "nvme" in (job.zero.param_tier, job.zero.optimizer_tier) and not job.check
    with zk.deferred_init(device) if deferred else contextlib.nullcontext():
        model = model_of(job.model)
    if not deferred:
        model.to(device)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    source = ", ".join(map(str, job.data)) or "Python's documentation and standard library"
    console.print(f"text      {len(raw) / 1e6:.1f} MB: {source}")
    sizes = f"{job.model.layers} layers, width {job.model.width}, context {job.model.context}"
    if isinstance(job.model, MixtureConfig):
        millions_used = millions - job.model.idle_numel / 1e6
        sizes += f"; a token uses {job.model.used} of {job.model.experts} experts in a layer, {millions_used:.2f}M parameters in all"
    console.print(f"model     {type(model).__name__}, {millions:.2f}M parameters: {sizes}", soft_wrap=True)

    dtype = job.zero.dtype or fast_dtype(device)
    plain = PlainTrainer(model, parse_dtype(dtype, "dtype"), job) if job.check else None
    optimizer = zk.ZeroOptimizer(model, adamw(model.parameters(), job.lr), job.zero, dtype=dtype)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(job.steps))
    if device.type == "cpu" and world > 1:
        torch.set_num_threads(optimizer.num_threads)  # torchrun sets one thread for each rank, however many cores there are
    console.print(
        f"zk        stage {job.zero.stage}, {str(optimizer.config.dtype).removeprefix('torch.')}"
        f"{' computed in fp32' * (job.zero.compute_dtype is not None)}, parameters on {optimizer.resting('param')}, "
        f"optimizer on {optimizer.resting('optimizer')}, {world} rank{'s' * (world > 1)}, "
        f"{optimizer.num_threads} thread{'s' * (optimizer.num_threads > 1)} per rank\n",
        soft_wrap=True,
    )

    if found is not None:
        position = resume.Position.of_extra(optimizer.load_checkpoint(found, scheduler=scheduler), raw)
        console.print(f"resume    after step {len(position.losses)}, from {found}\n", soft_wrap=True)
    else:
        if job.resume:
            console.print(f"resume    no checkpoint in {checkpoints} yet: from the beginning\n", soft_wrap=True)
        draws = torch.Generator().manual_seed(job.seed + 1)
        position = resume.Position([], validate(model, text, job, device), sample(model, text, job, device), draws, zlib.crc32(raw))
    record = Record(losses=position.losses, valid={0: position.valid})
    first = len(record.losses)
    vertical = is_vertical(optimizer, job.accumulation, job.accumulate)
    ended = any((job.out / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    if first > job.steps or (first == job.steps and ended):
        raise ValueError(f"the checkpoint is after step {first}, and --steps is {job.steps}: there is nothing left to do; give more --steps")
    rates, shown_at = Rates(optimizer), 0.0
    recording: Any = zk.profile(job.out / "profile", optimizer, steps=3, skip=2) if job.profile else contextlib.nullcontext()
    with resume.termination() as asked, recording:
        for step in range(first, job.steps):
            start = time.perf_counter()
            everyones = [Text.draw(text.train, job.batch * world, job.model.context, position.draws) for _ in range(job.accumulate)]
            mine = slice(rank * job.batch, (rank + 1) * job.batch)
            batches = [(ids[mine].to(device), targets[mine].to(device)) for ids, targets in everyones]
            with routed(model, optimizer, record):
                loss = train_step(model, optimizer, batches, vertical)
            scheduler.step()
            both = torch.tensor([loss, float(bool(asked))], dtype=torch.float64)
            optimizer.comm.all_reduce(both)
            record.losses.append(both[0].item() / world)
            record.step_ms.append((time.perf_counter() - start) * 1e3)
            if plain is not None:
                record.check_losses.append(plain.step([(ids.to(device), targets.to(device)) for ids, targets in everyones]))
            rates.tokens += job.batch * job.accumulate * job.model.context * world
            if time.monotonic() - shown_at > 10 or step + 1 in (first + 1, job.steps):
                shown_at, now = time.monotonic(), rates.take()
                waits = f" | {now['wait_share']:.0%} waiting: {reason_of(now)}" if now["wait_share"] >= 0.005 else ""
                speed = f"{now['tokens_per_s']:,.0f} tok/s | {now['step_s']:.3f} s/step"
                console.print(f"step {step + 1}/{job.steps} | loss {record.losses[-1]:.4f} | {speed}{waits}", soft_wrap=True)
            if both[1]:
                break
            if job.save_every and ((step + 1) % job.save_every == 0 or step + 1 == job.steps):
                resume.save(optimizer, scheduler, position, checkpoints, job.keep, beside=True)
        if len(record.losses) < job.steps:
            start = time.perf_counter()
            saved = resume.save(optimizer, scheduler, position, checkpoints, job.keep, beside=False)
            took = f"{time.perf_counter() - start:.1f} s"
            signalled = "Ctrl-C" if signal.SIGINT in asked else "SIGTERM"
            console.print(
                f"{signalled:10}saved after step {len(record.losses)} in {took}: {saved}\n          go on with --resume auto", soft_wrap=True
            )
        else:
            # the model first: what follows only tells about it
            written = resume.save_model(optimizer, job.out, {"gpt": repr(dataclasses.asdict(job.model))})
            record.valid[job.steps] = validate(model, text, job, device)
            samples = {"before": position.sample, "after": sample(model, text, job, device)} if job.sample else {}
            finish(console, job, record, optimizer, samples, written)
        optimizer.close()
        if world > 1:
            torch.distributed.destroy_process_group()
    return record


def train_step(model: GPT, optimizer: zk.ZeroOptimizer, batches: list[Batch], vertical: bool) -> float:
    """Train one step of these micro-batches, ``vertical``: block by block; returns the loss."""
    total = 0.0
    if vertical:
        with phase("backward", "model"):
            losses = optimizer.accumulate(batches, lambda model, batch: model(*batch) / len(batches))
        with phase("wait", "device: the loss"):
            total = sum(loss.item() for loss in losses)
    for ids, targets in batches if not vertical else ():
        with phase("forward", "model"):
            loss = model(ids, targets) / len(batches)
        with phase("backward", "model"):
            optimizer.backward(loss)
        with phase("wait", "device: the loss"):
            total += loss.item()
    with phase("step", "optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def validate(model: nn.Module, text: Text, job: Job, device: torch.device, num_batches: int = 4) -> float:
    """Mean cross entropy, in nats per byte, over the same held-out batches each time; the same on every rank."""
    draws = torch.Generator().manual_seed(job.seed + 2)
    total = 0.0
    model.eval()  # without the balance of experts
    for _ in range(num_batches):
        ids, targets = Text.draw(text.valid, job.batch, job.model.context, draws)
        total += model(ids.to(device), targets.to(device)).item()
    model.train()
    return total / num_batches


def sample(model: GPT, text: Text, job: Job, device: torch.device) -> str:
    """Continue a held-out line; all ranks take part, with the same random numbers."""
    if not job.sample:
        return ""
    prompt = text.valid[: min(64, job.model.context)].long()[None].to(device)
    ids = model.generate(prompt, job.sample, generator=torch.Generator().manual_seed(job.seed))
    return bytes(number for number in ids[0, prompt.shape[1] :].tolist() if number < 256).decode("utf-8", errors="replace")


def finish(console: Console, job: Job, record: Record, optimizer: zk.ZeroOptimizer, samples: dict[str, str], model: Path) -> None:
    """Print the summary, and write the trace, its picture, and the report."""
    metrics = optimizer.metrics()
    report.print_state(console, optimizer, sum(p.numel() for p in optimizer.model.parameters()))
    for when, text in samples.items():
        report.print_sample(console, when, text)
    peak = readable(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
    report.print_summary(console, record, metrics, peak, str(model))
