"""Train a GPT on the bytes of real text: `zk train`, a plain torch loop around ZeroOptimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import shutil
import signal
import statistics
import sysconfig
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress
from torch import Tensor

import zk
from zk.checkpoint import folders
from zk.checkpoint.export import export
from zk.config import parse_device
from zk.offload.cpu_adam import default_threads
from zk.tools.gpt import GPT, GPTConfig
from zk.tools.summary import size


@dataclasses.dataclass(slots=True)
class Run:
    """Measurements of a run. Checkpoints keep them."""

    crc32: int  # of the text
    steps: list[tuple[float, float, int]]  # loss, seconds, bytes of memory
    views: list[tuple[float, str]]  # loss and sample, before and after


def read_text(paths: Sequence[Path]) -> bytes:
    """The files' bytes; without files, Python's documentation and library, up to 6 MB."""
    text = b"".join(path.read_bytes() for path in paths)
    if not paths:
        with contextlib.suppress(ImportError):  # some distributions leave it out
            topics = importlib.import_module("pydoc_data.topics").topics
            text = "".join(f"{name}\n\n{topics[name]}\n\n" for name in sorted(topics)).encode()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes() if len(text) < 6_000_000 else b""
    return text


def split(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on and, the last tenth of every 64 KiB, to validate with: (n,) uint8 each."""
    if len(text) // 10 <= context + 1:
        raise ValueError(f"{len(text)} bytes of text are too few for --context {context}")
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    block = min(65536, len(text))
    trains = torch.arange(len(whole)) % block < block * 9 // 10
    return whole[trains], whole[~trains]


def draw(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets from random places, each (batch, context) int64."""
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - context - 1, (batch,), generator=draws)
    rows = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Note SIGTERM and the first Ctrl-C in the list, so that the run can save before it ends."""
    asked: list[int] = []

    def note(number: int, _frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second Ctrl-C ends it

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def draw_picture(run: Run, path: Path) -> str:
    """Write loss, time and memory of steps 2 to the last as a PNG; "" without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return ""
    from matplotlib.figure import Figure

    figure, columns = Figure(figsize=(9, 7), layout="constrained"), zip(*run.steps, strict=True)
    units = {"loss, nats per byte": 1, "s per step": 1, "GiB of memory in use": 2**30}
    panels = zip(figure.subplots(3, sharex=True), units.items(), columns, strict=True)
    for axes, (label, unit), values in panels:
        axes.plot(range(2, len(values) + 1), [v / unit for v in values[1:]], linewidth=1)
        axes.axhline(linewidth=0)  # autoscaling counts 0 in
        axes.set(ylabel=label, xlabel="step", ylim=(0, None))
    figure.savefig(path, dpi=120)
    return f", {path}"


def meeting_place() -> dict[str, Any]:
    """Where ranks meet: torch's own choice, but for torchrun's store, which outlives restarts.

    With ``--master-port`` it still has the addresses of ranks of earlier attempts.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world, dist = int(env["RANK"]), int(env["WORLD_SIZE"]), torch.distributed
    place = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = dist.TCPStore(*place, world, is_master=False)  # type: ignore[attr-defined]
    prefix = f"zk/attempt/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined, assignment]
    return {"store": store, "rank": rank, "world_size": world}


@dataclasses.dataclass
class Training:
    """The command, with its options, on this rank; the first rank prints and writes."""
    sizes: GPTConfig
    zero: zk.ZeroConfig
    data: Sequence[Path] = ()
    out: Path = Path("runs/latest")
    steps: int = 800
    batch: int = 16
    lr: float = 3e-3
    sample: int = 240
    save_every: int = 0
    resume: str | None = None

    def __post_init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank, self.device = int(os.environ.get("RANK", "0")), torch.device("cpu")
        self.console = Console(quiet=self.rank != 0, highlight=False, soft_wrap=True)
        if torch.cuda.is_available():
            self.device = parse_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}", "LOCAL_RANK")
            torch.cuda.set_device(self.device)
        if self.world > 1:
            torch.distributed.init_process_group(**meeting_place())
            torch.set_num_threads(default_threads())  # torchrun sets one thread for each rank
        text = read_text(self.data)
        self.text, self.valid = split(text, self.sizes.context)
        self.out.mkdir(parents=True, exist_ok=True)  # fails now if it cannot be written
        torch.manual_seed(0)
        with zk.deferred_init(self.device):
            self.model = GPT(self.sizes)
        numel = sum(param.numel() for param in self.model.parameters())
        source = ", ".join(map(str, self.data)) or "Python's documentation and standard library"
        self.console.print(f"text         {len(text) / 1e6:.1f} MB: {source}")
        self.console.print(f"model        {numel / 1e6:.2f}M parameters: {self.sizes}")
        self.optimizer = self.zero_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.run = self.resumed(Run(zlib.crc32(text), [], []))
        self.optimizer.metrics()  # rates begin
        self.first, columns = len(self.run.steps), (BarColumn(20), "{task.description}")
        self.shown = deque([(time.monotonic(), self.first)])  # in two minutes: when, which step
        is_off = not self.console.is_terminal
        self.bar = Progress(*columns, console=self.console, auto_refresh=False, disable=is_off)
        self.task = self.bar.add_task("", total=self.steps)

    def zero_optimizer(self) -> zk.ZeroOptimizer:
        """AdamW that decays matrices alone, in bf16 if the hardware multiplies it fast."""
        sides = [[p for p in self.model.parameters() if (p.ndim > 1) == i] for i in (False, True)]
        groups = [{"params": side, "weight_decay": 0.1 * i} for i, side in enumerate(sides)]
        adamw = torch.optim.AdamW(groups, self.lr, betas=(0.9, 0.95))
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        dtype = "bf16" if has_bf16 else "fp32"
        if self.device.type == "cuda":
            dtype = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        return zk.ZeroOptimizer(self.model, adamw, self.zero, dtype=self.zero.dtype or dtype)

    def rate(self, step: int) -> float:
        """The share of --lr: warm up over a tenth of the steps, then a cosine to a tenth."""
        warmup = max(1, self.steps // 10)
        done = max(0, step - warmup) / max(1, self.steps - warmup)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * done))

    def resumed(self, run: Run) -> Run:
        """Load the checkpoint to resume; returns its run. Raises ValueError if it cannot go on."""
        auto = self.resume == "auto"
        found = self.out / "checkpoints" if auto else Path(self.resume or "")
        is_new = not folders.named(found) and not folders.whole(found)
        if not self.resume or (auto and is_new):
            return run
        try:
            extra = self.optimizer.load_checkpoint(found, scheduler=self.scheduler)
        except ValueError as error:
            remedy = ": give --model and --context of the resumed run, or another --out"
            raise ValueError(f"{error}{remedy * ('this model' in str(error))}") from error
        if not isinstance(extra, dict) or extra.get("crc32") != run.crc32:
            raise ValueError(f"{found} is not of zk train with this text: give the same --data")
        run = Run(**extra)
        if len(run.steps) >= self.steps and (self.out / "model").exists():
            raise ValueError(f"all {self.steps} steps are done; to go on, raise --steps")
        self.console.print(f"resume       after step {len(run.steps)}, from {found}")
        return run

    def show(self) -> None:
        """Show the last step if it is time: every ten seconds, or more often in a terminal."""
        now, step, steps = time.monotonic(), len(self.run.steps), self.steps
        every = 0.25 if self.console.is_terminal else 10.0
        if now - self.shown[-1][0] < every and self.first + 1 < step < steps:
            return
        metrics, (then, before) = self.optimizer.metrics(), self.shown[0]
        self.shown.append((now, step))
        each, is_first = (now - then) / (step - before), before == self.first
        if now - then > 120 or is_first:  # the first step is slow
            self.shown.popleft()
        left, lost = round(each * (steps - step)), int(metrics["skipped_steps"])
        can_wait = self.world > 1 or self.device.type == "cuda" or self.zero.nvme_path
        rate = f"{self.world * self.batch * self.sizes.context / each:,.0f} bytes/s"
        said = [f"step {step:{len(str(steps))}}/{steps}", f"loss {self.run.steps[-1][0]:.4f}"]
        said += [f"{each:.3f} s/step", rate] * (not is_first) + [f"{lost} skipped"] * (lost > 0)
        said += [f"waits {metrics.get('wait_share', 0):.0%}"] * bool(can_wait)
        said += [f"eta {left // 60} min {left % 60:02} s"] * (not is_first and step < steps)
        line = "  ".join(said)
        self.bar.update(self.task, completed=step, description=line, refresh=True)
        if not self.console.is_terminal:
            self.console.print(line)

    @torch.no_grad()
    def evaluate(self, when: str) -> None:
        """Add the loss, on the same held-out batches each time, and a sample. On all ranks."""
        self.console.print(f"validation   {when} training ...", end=" ")
        context, device = self.sizes.context, self.device
        batches = (draw(self.valid, self.batch, context, seed) for seed in range(4))
        loss = statistics.fmean(self.model(x.to(device), y.to(device)).item() for x, y in batches)
        prompt = self.valid[: min(64, context)].long()[None].to(device)
        ids = self.model.generate(prompt, self.sample, torch.Generator().manual_seed(0))
        text = bytes(byte for byte in ids[0, prompt.shape[1] :].tolist() if byte < 256)
        shown = text.decode(errors="replace").replace("\ufffd", "·")
        self.run.views.append((loss, "".join(c for c in shown if c.isprintable() or c == "\n")))
        self.console.print(f"{loss:.4f} nats per byte" + ": try a lower --lr" * math.isnan(loss))

    def step(self, step: int, asked: Sequence[int]) -> bool:
        """Train one step. True on all ranks if a signal has been ``asked`` on one of them."""
        start, mine = time.perf_counter(), slice(self.rank, None, self.world)
        ids, targets = draw(self.text, self.batch * self.world, self.sizes.context, step)
        loss = self.model(ids[mine].to(self.device), targets[mine].to(self.device))
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        told = torch.tensor([loss.item() / self.world, len(asked)], device=self.device)
        if self.world > 1:
            torch.distributed.all_reduce(told)
        on_gpu, seconds = self.device.type == "cuda", time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss
        self.run.steps.append((told[0].item(), seconds, memory))
        return bool(told[1])

    def loop(self) -> int:
        """Train up to --steps, with checkpoints. Returns the signal that ended it before, or 0."""
        save, folder = self.optimizer.save_checkpoint, self.out / "checkpoints"
        with signals() as asked, self.bar:
            for step in range(self.first + 1, self.steps + 1):
                ends = self.step(step, asked)
                self.show()
                if ends or step % (self.save_every or self.steps) == 0 or step == self.steps:
                    start, extra = time.perf_counter(), dataclasses.asdict(self.run)
                    saved = save(folder, scheduler=self.scheduler, extra=extra, keep=2)
                if ends and step < self.steps:
                    said = f"after step {step} in {time.perf_counter() - start:.1f} s: {saved}"
                    self.console.print(f"saved {said}; go on with --resume auto")
                    return (*asked, signal.SIGTERM)[0]
        return 0

    def finish(self) -> None:
        """Save the model and the picture, and say where; print samples, time and memory."""
        out, run, say = self.out, self.run, self.console.print
        shutil.rmtree(out / "model", ignore_errors=True)
        export(out / "checkpoints", out / "model")
        _, seconds, memory = zip(*run.steps, strict=True)
        say(f"saved        {out / 'model'}{draw_picture(run, out / 'training.png')}")
        used = f"{statistics.median(seconds):.3f} s (median) and at most {size(max(memory))}"
        say(f"a step took  {used} of memory")
        for when, (_, text) in zip(("before", "after"), run.views, strict=True):
            lines = "\n".join(f"  | {line}" for line in text.splitlines())
            say(f"\nsample {when} training\n{lines}", markup=False)

    def train(self) -> int:
        """Train. Returns the signal that ended it early, after a checkpoint; or 0."""
        if not self.run.views:
            self.evaluate("before")
        ended = self.loop()
        if not ended:
            self.evaluate("after")
        if not ended and self.rank == 0:
            self.finish()
        self.optimizer.close()
        if self.world > 1:
            torch.distributed.destroy_process_group()
        return ended
