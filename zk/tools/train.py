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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zk
from zk.checkpoint import files
from zk.checkpoint.export import export
from zk.config import parse_device
from zk.offload.cpu_adam import default_threads
from zk.parallel.comm import connect
from zk.tools.doctor import multiplies_bf16
from zk.tools.gpt import GPT, GPTConfig
from zk.tools.metrics import peak_nbytes
from zk.tools.summary import size

History = list[tuple[float, float, int]]  # of each step: loss, seconds, bytes of memory


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


def draw_picture(history: History, path: Path) -> None:
    """Draw loss, time and memory of steps 2 to the last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, seconds, nbytes = (values[1:] for values in zip(*history, strict=True))
    panels: dict[str, Any] = {"loss, nats per byte": losses, "s per step": seconds}
    panels["GiB of memory, at most"] = [one / 2**30 for one in nbytes]
    for axes, (label, values) in zip(figure.subplots(3, sharex=True), panels.items(), strict=True):
        axes.plot(range(2, len(values) + 2), values, linewidth=1)
        axes.axhline(linewidth=0)  # autoscaling counts 0 in
        axes.set(ylabel=label, xlabel="step", ylim=(0, None))
    figure.savefig(path, dpi=120)


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
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = parse_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}", "LOCAL_RANK")
            torch.cuda.set_device(self.device)
        if self.world > 1:
            connect()
            torch.set_num_threads(default_threads())  # torchrun sets one thread for each rank
        text = read_text(self.data)
        self.crc32 = zlib.crc32(text)
        self.text, self.valid = split(text, self.sizes.context)
        self.out.mkdir(parents=True, exist_ok=True)  # fails now if it cannot be written
        torch.manual_seed(0)
        with zk.deferred_init(self.device):
            self.model = GPT(self.sizes)
        numel = sum(param.numel() for param in self.model.parameters())
        source = ", ".join(map(str, self.data)) or "Python's documentation and standard library"
        self.say(f"text         {len(text) / 1e6:.1f} MB: {source}")
        self.say(f"model        {numel / 1e6:.2f}M parameters: {self.sizes}")
        self.optimizer = self.zero_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.history = self.resumed()
        self.first, self.shown = len(self.history) + 1, time.monotonic()
        self.optimizer.metrics()  # rates begin

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def zero_optimizer(self) -> zk.ZeroOptimizer:
        """AdamW that decays matrices alone, in bf16 if the hardware multiplies it fast."""
        params = list(self.model.parameters())
        matrices = {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}
        others = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}
        adamw = torch.optim.AdamW([matrices, others], self.lr, betas=(0.9, 0.95))
        dtype = "bf16" if multiplies_bf16() else "fp32"
        if self.device.type == "cuda":
            dtype = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        return zk.ZeroOptimizer(self.model, adamw, self.zero, dtype=self.zero.dtype or dtype)

    def rate(self, step: int) -> float:
        """The share of --lr: warm up over a tenth of the steps, then a cosine to a tenth."""
        warmup = max(1, self.steps // 10)
        done = max(0, step - warmup) / max(1, self.steps - warmup)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * done))

    def resumed(self) -> History:
        """Load the checkpoint to resume; returns what its run has done, or nothing."""
        is_auto = self.resume == "auto"
        found = self.out / "checkpoints" if is_auto else Path(self.resume or "")
        is_new = is_auto and not files.named(found) and not files.whole(found)
        if self.resume is None or is_new:
            return []
        extra = self.optimizer.load_checkpoint(found, scheduler=self.scheduler)
        if not isinstance(extra, dict) or extra.get("crc32") != self.crc32:
            raise ValueError(f"{found} is not of zk train with this text: give the same --data")
        history: History = extra["history"]
        if len(history) >= self.steps and (self.out / "model").exists():
            raise ValueError(f"all {self.steps} steps are done; to go on, raise --steps")
        self.say(f"resume       after step {len(history)}, from {found}")
        return history

    def show(self, step: int) -> None:
        """Show the first step, the last, and one every ten seconds."""
        now, is_first = time.monotonic(), step == self.first
        if now - self.shown < 10 and not is_first and step < self.steps:
            return
        self.shown, told = now, self.optimizer.metrics()
        said = f"step {step:{len(str(self.steps))}}/{self.steps}  loss {self.history[-1][0]:.4f}"
        if not is_first:  # that one compiles
            each = told["step_s"]
            minutes, seconds = divmod(round(each * (self.steps - step)), 60)
            rate = self.world * self.batch * self.sizes.context / each
            said += f"  {each:.3f} s/step  {rate:,.0f} bytes/s  waits {told['wait_share']:.0%}"
            said += f"  eta {minutes} min {seconds:02} s"
        self.say(said + f"  {told['skipped_steps']:.0f} skipped" * (told["skipped_steps"] > 0))

    @torch.no_grad()
    def evaluate(self, when: str) -> None:
        """Print the loss, on the same held-out batches each time, and a sample. On all ranks."""
        context, device = self.sizes.context, self.device
        batches = (draw(self.valid, self.batch, context, seed) for seed in range(4))
        loss = statistics.fmean(self.model(x.to(device), y.to(device)).item() for x, y in batches)
        remedy = ": try a lower --lr" * math.isnan(loss)
        self.say(f"validation   {when} training ... {loss:.4f} nats per byte{remedy}")
        prompt = self.valid[: min(64, context)].long()[None].to(device)
        ids = self.model.generate(prompt, self.sample, torch.Generator().manual_seed(0))
        text = bytes(byte for byte in ids[0, prompt.shape[1] :].tolist() if byte < 256)
        shown = text.decode(errors="ignore")
        lines = "".join(c for c in shown if c.isprintable() or c == "\n").splitlines()
        self.say("\n  | ".join([f"sample       {when} training", *lines]))

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
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated() if on_gpu else peak_nbytes()
        self.history.append((told[0].item(), time.perf_counter() - start, memory))
        return bool(told[1])

    def save(self) -> Any:
        """Save a checkpoint; returns its folder."""
        extra = {"crc32": self.crc32, "history": self.history}
        folder = self.out / "checkpoints"
        return self.optimizer.save_checkpoint(folder, scheduler=self.scheduler, extra=extra, keep=2)

    def loop(self) -> int:
        """Train up to --steps, with checkpoints. Returns the signal that ended it before, or 0."""
        every = self.save_every or self.steps
        with signals() as asked:
            for step in range(self.first, self.steps + 1):
                ends = self.step(step, asked)
                self.show(step)
                if ends or step % every == 0 or step == self.steps:
                    start, saved = time.perf_counter(), self.save()
                if ends and step < self.steps:
                    said = f"after step {step} in {time.perf_counter() - start:.1f} s: {saved}"
                    self.say(f"saved {said}; go on with --resume auto")
                    return (*asked, signal.SIGTERM)[0]
        return 0

    def finish(self) -> None:
        """Save the model and the picture, and say where, and what a step took."""
        out, picture = self.out, self.out / "training.png"
        shutil.rmtree(out / "model", ignore_errors=True)
        export(out / "checkpoints", out / "model")
        self.say(f"saved        {out / 'model'}")
        if importlib.util.find_spec("matplotlib"):
            draw_picture(self.history, picture)
            self.say(f"picture      {picture}")
        _, seconds, memory = zip(*self.history, strict=True)
        used = f"{statistics.median(seconds):.3f} s (median) and at most {size(max(memory))}"
        self.say(f"a step took  {used} of memory")

    def train(self) -> int:
        """Train. Returns the signal that ended it early, after a checkpoint; or 0."""
        if not self.history:
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
