"""The command line, `zk` and `python -m zk`; `--help` lists the commands, and needs no torch."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from zk import __version__


class Commands(TyperGroup):
    """Commands whose errors are one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            is_fault = isinstance(error, RuntimeError) and "can't allocate memory" not in str(error)
            if is_fault or isinstance(error, BrokenPipeError):
                raise
            said: object = error
            if isinstance(error, OSError) and error.filename and error.strerror:
                said = f"{error.filename}: {error.strerror}"
            typer.secho(f"zk {ctx.invoked_subcommand}: {said}", err=True, fg="red")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.secho(f"zk {ctx.invoked_subcommand}: interrupted", err=True, fg="red")
            raise typer.Exit(130) from None


app = typer.Typer(name="zk", cls=Commands, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    app(prog_name="zk")


def show_version(wanted: bool) -> None:
    """Print the version and end, if that is ``wanted``."""
    if wanted:
        typer.echo(f"zk {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def start(
    version: Annotated[
        bool,
        Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # the locale may lack a character


@app.command()
def train(
    data: Annotated[list[Path] | None, Option(help="Text file; repeatable.", exists=True)] = None,
    out: Annotated[Path, Option(help="Folder to write.")] = Path("runs/latest"),
    model: Annotated[str, Option(help="gpt:125m, or by name.")] = "gpt:layers=6,width=256",
    context: Annotated[int, Option(min=2, help="Bytes the model sees at once.")] = 128,
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 800,
    batch: Annotated[int, Option(min=1, help="Sequences per rank and step.")] = 16,
    lr: Annotated[float, Option(min=0.0, help="Peak learning rate.")] = 3e-3,
    stage: Annotated[int, Option(help="ZeRO stage, 0 to 3.")] = 3,
    dtype: Annotated[str | None, Option(help="Default: bf16 where it is fast.")] = None,
    param_tier: Annotated[str | None, Option(help="Default: host at stage 3.")] = None,
    optimizer_tier: Annotated[str, Option(help="device, host, nvme or auto.")] = "host",
    nvme_path: Annotated[list[Path] | None, Option(help="Folder, repeatable.")] = None,
    host_budget: Annotated[str | None, Option(help="For training state, as 4GiB.")] = None,
    save_every: Annotated[int, Option(min=0, help="Steps between checkpoints.")] = 0,
    resume: Annotated[str | None, Option(help="A folder; auto: OUT's newest, if any.")] = None,
    sample: Annotated[int, Option(min=0, help="Bytes to write before and after.")] = 240,
) -> None:
    """Train a small GPT on text. On several GPUs: torchrun --nproc_per_node 2 -m zk train.

    Ctrl-C saves a checkpoint after the current step. Without a launcher, it exits with code 130.
    SIGTERM does the same, and exits with 0.
    """
    from zk.config import ZeroConfig
    from zk.tools.gpt import config_of
    from zk.tools.train import Training

    place: dict[str, Any] = {"nvme_path": tuple(map(str, nvme_path or ())) or None}
    place |= {"param_tier": param_tier or ("host" if stage == 3 else "device")}
    place |= {"optimizer_tier": optimizer_tier, "host_budget": host_budget}
    zero = ZeroConfig(stage=stage, dtype=dtype, clip_grad_norm=1.0, **place)
    sizes = config_of(model, context)
    run = Training(sizes, zero, data or (), out, steps, batch, lr, sample, save_every, resume)
    raise typer.Exit(130 if run.train() == signal.SIGINT else 0)


@app.command()
def plan(
    model: Annotated[str, Argument(help="gpt:10b, llama:8b, config.json, module:factory.")],
    gpu: Annotated[str | None, Option(help="24GiB, none, or a card (4090, h100).")] = None,
    ram: Annotated[str | None, Option(help="Memory of a machine (128GiB).")] = None,
    nvme: Annotated[str | None, Option(help="Room on a machine's drive (1TiB).")] = None,
    world: Annotated[int, Option(min=1, help="Ranks. Up to 8 share a machine.")] = 1,
    tokens: Annotated[int, Option(min=1, help="Of a step on each rank.")] = 4096,
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    state_dtype: Annotated[str, Option(help="AdamW's moments: fp32, bf16, 8bit.")] = "fp32",
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what of a model fits on a machine, before training. Exit code 1: nothing fits."""
    import json

    from zk.tools.plan import Machine, Plan, model_of, report

    machine = Machine.of(gpu, ram, nvme, world)
    numbers: dict[str, Any] = {"tokens": tokens, "dtype": dtype, "state_dtype": state_dtype}
    what = Plan(name=model, model=model_of(model), machine=machine, **numbers)
    rows, best = what.answer()
    found = {"tokens": tokens, "best": best.dump(), "rows": [row.dump() for row in rows]}
    typer.echo(json.dumps(found) if as_json else "\n".join(report(what, rows, best)))
    raise typer.Exit(bool(best.missing))


@app.command()
def export(
    checkpoint: Annotated[Path, Argument(help="Folder of checkpoints, or one.", exists=True)],
    out: Annotated[Path, Argument(help="Folder to make.")],
    dtype: Annotated[str | None, Option(help="Default: as each was trained.")] = None,
    shard_size: Annotated[str, Option(help="Largest file.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as safetensors files, with its own parameter names."""
    from zk.checkpoint.export import export as run
    from zk.config import parse_dtype, parse_nbytes

    wanted = parse_dtype(dtype, "--dtype") if dtype else None
    done = run(checkpoint, out, wanted, parse_nbytes(shard_size, "--shard-size"))
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    typer.echo(f"{done.num_tensors} tensors, {done.nbytes / 1e9:.3f} GB in {files}: {out}")
    for name, kept in done.tied.items():
        typer.echo(f"{name} is tied to {kept}, and written once")


@app.command()
def doctor(
    path: Annotated[list[Path] | None, Option(help="Drive to measure, repeatable.")] = None,
) -> None:
    """Check this machine for problems and suggest fixes. Exit code 1 if something must be fixed."""
    from rich.console import Console
    from rich.table import Table

    from zk.tools import doctor as checks

    table = Table("", "", "found", "what to do", box=None, pad_edge=False)
    must, shown, drives = False, "", [row for one in path or () for row in checks.drive(one)]
    for row in (*checks.packages(), *checks.machine(), *drives):
        style = "red" if row.must else "yellow" if row.to_do else ""
        table.add_row(row.part * (row.part != shown), row.what, row.found, row.to_do, style=style)
        must, shown = must or row.must, row.part
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else 140  # a file has no width
    console.print(table)
    raise typer.Exit(int(must))
