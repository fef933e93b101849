"""In: options of `python -m zk train`. Out: a trained GPT, its losses, samples and pictures. The loop is an ordinary torch loop."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import zk
from zk.config import parse_device, parse_dtype
from zk.memory import peak_nbytes
from zk.offload.tiers import readable
from zk.precision import has_fast_products
from zk.timeline import Recorder, Timeline, phase, write_chrome_trace
from zk.train import overlap, resume
from zk.train.data import Text, read_text
from zk.train.gpt import GPT, GPTConfig
from zk.train.save import save_model


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Options of the command, as named there."""

    data: tuple[Path, ...] = ()
    out: Path = Path("runs/latest")
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    steps: int = 800
    batch: int = 16
    accumulate: int = 1
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


@dataclasses.dataclass(slots=True)
class Record:
    """What a run leaves behind for its report."""

    losses: list[float] = dataclasses.field(default_factory=list)
    valid: dict[int, float] = dataclasses.field(default_factory=dict)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    # one step: (phase, {"device param": bytes, ...}) at each sampling point, in order
    timeline: list[tuple[str, dict[str, int]]] = dataclasses.field(default_factory=list)
    check_losses: list[float] = dataclasses.field(default_factory=list)
    profiled: tuple[int, Timeline] | None = None  # number of a step, from 1, and what went on in it


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


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


class PlainTrainer:
    """The same training in plain torch, to compare losses with: 16-bit parameters, fp32 masters, AdamW."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, job: Job) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(groups(_ParameterList(self.masters)), lr=job.lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule(job.steps))
        self.clip = job.zero.clip_grad_norm

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for ids, targets in batches:
            loss = self.model(ids, targets) / len(batches)
            total += loss.item()
            loss.backward()
            for param, master in zip(self.model.parameters(), self.masters, strict=True):
                assert param.grad is not None
                wide = param.grad.float()
                master.grad = wide if master.grad is None else master.grad + wide
                param.grad = None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters, strict=True):
                param.copy_(master)
        return total


class _ParameterList(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.items = nn.ParameterList(params)


def train(job: Job) -> Record:
    """Run the job on this rank; the first rank prints and writes files. Returns what it recorded."""
    termination = resume.Termination()
    try:
        return _train(job, termination)
    finally:
        termination.end()


def _train(job: Job, termination: resume.Termination) -> Record:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = parse_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(device)
    console = Console(quiet=rank != 0, highlight=False)
    if rank == 0:
        job.out.mkdir(parents=True, exist_ok=True)  # find out now that it cannot be written
    if job.check and job.resume:
        raise ValueError("--check trains plain PyTorch from the first step on, and its state is in no checkpoint; leave out --check or --resume")
    checkpoints = job.out / "checkpoints"
    found = resume.find(job.resume, checkpoints)
    raw = read_text(job.data)
    text = Text.of(raw, job.model.context)
    torch.manual_seed(job.seed)
    # a model for the drive is not built in memory first, unless plain PyTorch is to train it too
    deferred = "nvme" in (job.zero.param_tier, job.zero.optimizer_tier) and not job.check
    with zk.deferred_init(device) if deferred else contextlib.nullcontext():
        model = GPT(job.model)
    if not deferred:
        model.to(device)
    num_params = sum(p.numel() for p in model.parameters())
    source = ", ".join(map(str, job.data)) or "Python's documentation and standard library"
    console.print(f"text      {len(raw) / 1e6:.1f} MB: {source}")
    shape = f"{job.model.layers} layers, width {job.model.width}, context {job.model.context}"
    console.print(f"model     GPT, {num_params / 1e6:.2f}M parameters: {shape}")

    dtype = job.zero.dtype or fast_dtype(device)
    plain = None
    if job.check:
        plain = PlainTrainer(model, parse_dtype(dtype, "dtype"), job)
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(groups(model), lr=job.lr, betas=(0.9, 0.95)), job.zero, dtype=dtype)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(job.steps))
    if device.type == "cpu" and world > 1:
        torch.set_num_threads(optimizer.num_threads)  # torchrun sets one thread for each rank, however many cores there are
    console.print(
        f"zk        stage {job.zero.stage}, {str(optimizer.config.dtype).removeprefix('torch.')}, parameters on {optimizer.resting('param')}, "
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
    first, before, draws = len(position.losses), position.sample, position.draws
    ended = any((job.out / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    if first > job.steps or (first == job.steps and ended):
        raise ValueError(f"the checkpoint is after step {first}, and --steps is {job.steps}: there is nothing left to do; give more --steps")
    termination.begin()
    with _progress(console, job.steps, first) as advance:
        for step in range(first, job.steps):
            start = time.perf_counter()
            batches, everyones = [], []
            for _ in range(job.accumulate):
                ids, targets = Text.draw(text.train, job.batch * world, job.model.context, draws)
                mine = slice(rank * job.batch, (rank + 1) * job.batch)
                batches.append((ids[mine].to(device), targets[mine].to(device)))
                everyones.append((ids.to(device), targets.to(device)))
            watch = step == job.steps - 1
            profile = job.profile and step == max(0, job.steps - 2)  # late, and not the one that is watched, if there is another
            with (
                _profile(model, device, record, step) if profile else contextlib.nullcontext(),
                _watch(model, optimizer, record) if watch else _nothing() as note,
            ):
                total = 0.0
                for ids, targets in batches:
                    with phase("forward", "model"):
                        loss = model(ids, targets) / job.accumulate
                    note("forward")
                    with phase("backward", "model"):
                        optimizer.backward(loss)
                    with phase("wait", "device: the loss"):
                        total += loss.item()
                note("backward")
                with phase("step", "optimizer"):
                    optimizer.step()
                note("step")
                optimizer.zero_grad()
            scheduler.step()
            mean, ends = _over_ranks(total, termination.asked, optimizer)
            record.losses.append(mean)
            record.step_ms.append((time.perf_counter() - start) * 1e3)
            if plain is not None:
                record.check_losses.append(plain.step(everyones))
            advance(record, job.batch * world * job.accumulate * job.model.context, optimizer)
            if ends:
                break
            if job.save_every and ((step + 1) % job.save_every == 0 or step + 1 == job.steps):
                resume.save(optimizer, scheduler, position, checkpoints, job.keep, beside=True)
    if len(record.losses) < job.steps:
        start = time.perf_counter()
        saved = resume.save(optimizer, scheduler, position, checkpoints, job.keep, beside=False)
        took = time.perf_counter() - start
        console.print(f"SIGTERM   saved after step {len(record.losses)} in {took:.1f} s: {saved}\n          go on with --resume auto", soft_wrap=True)
        _leave(optimizer, world)
        return record
    # the model first: what follows only tells about it
    written = save_model(model, job.out, {"gpt": repr(dataclasses.asdict(job.model))}, write=rank == 0)
    record.valid[job.steps] = validate(model, text, job, device)
    after = sample(model, text, job, device)
    _report(console, job, record, optimizer, before, after, rank, model, written)
    _leave(optimizer, world)
    return record


def _leave(optimizer: zk.ZeroOptimizer, world: int) -> None:
    optimizer.close()
    if world > 1:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def validate(model: nn.Module, text: Text, job: Job, device: torch.device, num_batches: int = 4) -> float:
    """Mean cross entropy, in nats per byte, over the same held-out batches each time; the same on every rank."""
    draws = torch.Generator().manual_seed(job.seed + 2)
    total = 0.0
    for _ in range(num_batches):
        ids, targets = Text.draw(text.valid, job.batch, job.model.context, draws)
        total += model(ids.to(device), targets.to(device)).item()
    return total / num_batches


def sample(model: GPT, text: Text, job: Job, device: torch.device) -> str:
    """What the model writes after a held-out line; all ranks take part, with the same random numbers."""
    if not job.sample:
        return ""
    prompt = text.valid[: min(64, job.model.context)].long()[None].to(device)
    ids = model.generate(prompt, job.sample, generator=torch.Generator().manual_seed(job.seed))
    return bytes(ids[0, prompt.shape[1] :].tolist()).decode("utf-8", errors="replace")


def _over_ranks(loss: float, asked: bool, optimizer: zk.ZeroOptimizer) -> tuple[float, bool]:
    """The mean loss, and whether any rank was asked to end."""
    total = torch.tensor([loss, float(asked)], dtype=torch.float64)
    optimizer.comm.all_reduce(total)
    return total[0].item() / optimizer.comm.world, bool(total[1])


@contextmanager
def _nothing() -> Iterator[Callable[[str], None]]:
    yield lambda phase: None


@contextmanager
def _profile(model: GPT, device: torch.device, record: Record, step: int) -> Iterator[Recorder]:
    """Note what each resource does, and when, while one step goes by."""
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    with overlap.recorded(blocks, device) as recorder:
        yield recorder
    record.profiled = (step + 1, recorder.timeline)


@contextmanager
def _watch(model: GPT, optimizer: zk.ZeroOptimizer, record: Record) -> Iterator[Callable[[str], None]]:
    """Note the bytes of every tier as one step goes through its phases, block by block."""

    def note(phase: str) -> None:
        metrics = {key.removesuffix("_nbytes"): int(value) for key, value in optimizer.metrics().items() if _is_tier(key)}
        sizes = {key.replace("_", " ", 1): value for key, value in metrics.items()}
        record.timeline.append((phase, sizes))

    handles = []
    for block in model.blocks:
        handles.append(block.register_forward_pre_hook(lambda *_: note("forward")))
        handles.append(block.register_full_backward_hook(lambda *_: note("backward")))
    note("start")
    try:
        yield note
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _progress(console: Console, steps: int, first: int) -> Iterator[Callable[[Record, int, zk.ZeroOptimizer], None]]:
    """A live bar on a terminal; elsewhere one line for every twentieth of the steps."""
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps, completed=first, status="")

        def advance(record: Record, tokens: int, optimizer: zk.ZeroOptimizer) -> None:
            recent = sorted(record.step_ms[-20:])[len(record.step_ms[-20:]) // 2]
            status = f"loss {record.losses[-1]:.3f}  {tokens / recent * 1e3:,.0f} tokens/s  {tiers(optimizer)}"
            bar.update(task, advance=1, status=status)
            done = len(record.losses)
            if not console.is_terminal and (done == first + 1 or done % max(1, steps // 20) == 0):
                console.print(f"step {done:5d}/{steps}  {status}", soft_wrap=True)

        yield advance


def _is_tier(key: str) -> bool:
    """Whether a metric is bytes of training state on a tier."""
    return key.endswith("_nbytes") and key.split("_")[0] in ("device", "host", "nvme")


def tiers(optimizer: zk.ZeroOptimizer) -> str:
    """Bytes of training state on each tier, of this rank: "device 9.4 MiB  host 56.5 MiB"."""
    totals: dict[str, float] = {}
    for key, value in optimizer.metrics().items():
        if _is_tier(key):
            totals[key.split("_")[0]] = totals.get(key.split("_")[0], 0) + value
    return "  ".join(f"{tier} {nbytes / 2**20:,.1f} MiB" for tier, nbytes in totals.items() if nbytes)


def _report(
    console: Console, job: Job, record: Record, optimizer: zk.ZeroOptimizer, before: str, after: str, rank: int, model: GPT, saved: Path
) -> None:
    metrics = optimizer.metrics()
    num_params = sum(p.numel() for p in model.parameters())
    table = Table(title="training state of this rank", title_justify="left", box=None, pad_edge=False)
    for heading, justify in (("tier", "left"), ("what", "left"), ("MiB", "right"), ("bytes per parameter of the model", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for key, nbytes in metrics.items():
        if _is_tier(key) and nbytes:
            tier, _, kind = key.removesuffix("_nbytes").partition("_")
            table.add_row(tier, kind.replace("_", " "), f"{nbytes / 2**20:,.2f}", f"{nbytes / num_params:.2f}")
    console.print()
    console.print(table)
    files = []
    if record.profiled is not None:
        step, timeline = record.profiled
        overlap.print_table(console, timeline, step)
        files.append(write_chrome_trace(timeline, job.out / ("trace.json" if rank == 0 else f"trace-rank{rank}.json"), rank))
    if job.sample:
        for when, text in (("before", before), ("after", after)):
            console.print(f"\n[bold]sample {when} training[/bold]")
            console.print(_printable(text), markup=False)
    if rank == 0:
        from zk.train import picture

        files.insert(0, saved)
        pictures = [picture.draw(record, job.out / "training.png")] if record.step_ms else []  # else all steps were done before
        if record.profiled is not None:
            pictures.append(overlap.draw(timeline, job.out / "timeline.png", step))
        drawn = [path for path in pictures if path is not None]
        steps = sorted(record.step_ms)
        console.print(f"\nvalidation loss  {record.valid[0]:.4f} -> [bold]{record.valid[job.steps]:.4f}[/bold] nats per byte")
        if steps:
            skipped = f"{int(metrics['skipped_steps'])} of {job.steps} steps skipped"
            console.print(f"step             {steps[len(steps) // 2]:.0f} ms (median); {skipped}")
        if metrics["gathers"]:
            console.print(f"gathers          {int(metrics['gathers'])}, {metrics['prefetch_hits'] / metrics['gathers']:.0%} asked for ahead of use")
        if "fetches" in metrics:
            read, wrote = metrics["fetched_nbytes"] / 2**30, metrics["evicted_nbytes"] / 2**30
            waited = f"{metrics['stall_ms'] / 1e3:.1f} s of waiting for it"
            console.print(f"drive            {read:.2f} GiB read, {wrote:.2f} GiB written, {metrics['fetch_hit_rate']:.0%} ahead of use, {waited}")
        device = optimizer.held[0].unit.device
        if device.type == "cuda":
            console.print(f"device memory    {readable(torch.cuda.max_memory_allocated(device))} at most, tensors of this process")
        console.print(f"host memory      {peak_nbytes() / 2**30:.2f} GiB at most, all of this process")
        if record.check_losses:
            worst = max(abs(a - b) for a, b in zip(record.losses, record.check_losses, strict=True))
            both = f"last loss {record.losses[-1]:.6f}, plain PyTorch {record.check_losses[-1]:.6f}"
            console.print(f"check            {both}; largest difference of any step {worst:.2g}")
        names = ", ".join(map(str, (*files, *drawn))) + ("" if drawn or not pictures else " (no picture: matplotlib is not installed)")
        console.print(f"saved            {names}", soft_wrap=True)
        if record.profiled is not None:
            console.print(f"                 open {files[1]} in https://ui.perfetto.dev", soft_wrap=True)


def _printable(text: str) -> str:
    lines = "".join(c if (c.isprintable() and c != "\ufffd") or c == "\n" else "·" for c in text).splitlines()
    return "\n".join("  | " + line for line in lines)
