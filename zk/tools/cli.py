"""The command line, `zk` and `python -m zk`; `--help` lists the commands, and needs no torch."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zk import __version__
from zk.bench.commands import app as bench
from zk.tools.terminal import chosen, mendable, zero_config


class Commands(TyperGroup):
    """Errors that users can fix are one line. `zk plan` is imported when it is called: its options need torch."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == ["plan"]:
            from zk.tools.plan import plan

            alone = typer.Typer(add_completion=False)
            alone.command("plan", no_args_is_help=True)(plan)
            self.commands["plan"] = typer.main.get_command(alone)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            is_memory = "can't allocate memory" in str(error)  # torch raises RuntimeError for it
            is_pipe = isinstance(error, BrokenPipeError)
            if is_pipe or (isinstance(error, RuntimeError) and not is_memory):
                raise
            said: object = error
            if isinstance(error, OSError) and error.filename and error.strerror:
                said = f"{error.filename}: {error.strerror}"
            typer.secho(f"zk {ctx.invoked_subcommand}: {said}", err=True, fg="red")
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    app(prog_name="zk")


def show_version(wanted: bool) -> None:
    """Print the version and end, if that is ``wanted``."""
    if wanted:
        typer.echo(f"zk {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(
                errors="replace"
            )  # the locale may not have a character that is printed


@app.command()
def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to learn from; may be repeated. Default: Python's own documentation and sources.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the model and its checkpoints.")
    ] = Path("runs/latest"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 800,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and micro-batch.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    accumulation: Annotated[
        str,
        typer.Option(
            help="Their order: horizontal, one after the other; vertical, block by block; auto, vertical where state rests elsewhere."
        ),
    ] = "auto",
    model: Annotated[
        str,
        typer.Option(
            help="gpt:125m; moe:100m or moe:30b-a3b, mixtures of experts; or sizes: gpt:width=512, moe:experts=64,used=2."
        ),
    ] = "gpt:layers=6",
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Of the model; so are the next two. Default: as --model has it."),
    ] = None,
    width: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2, help="Bytes the model sees at once. Default: as --model has it, or 128."
        ),
    ] = None,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 3e-3,
    stage: Annotated[
        int,
        typer.Option(
            help="ZeRO stage: 0 nothing partitioned, 1 optimizer state, 2 and gradients, 3 and parameters."
        ),
    ] = 3,
    optimizer_tier: Annotated[
        str,
        typer.Option(help="Where gradients and optimizer state live: device, host, nvme, auto."),
    ] = "host",
    param_tier: Annotated[
        str | None,
        typer.Option(
            help="Where parameters rest between uses: device; at stage 3 also host, nvme, auto. Default: host at stage 3."
        ),
    ] = None,
    nvme_path: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder on the drive, for the nvme tier; repeat it to stripe over several.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    device_budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory that training state may take; tiers that are auto fill it first."
        ),
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Host memory that training state may take, such as 4GiB.")
    ] = None,
    state_dtype: Annotated[
        str, typer.Option(help="Adam's moments: fp32; bf16, which halves them; or 8bit.")
    ] = "fp32",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16 or fp32. Default: bf16 where the hardware multiplies it, else fp32."
        ),
    ] = None,
    compute_dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32, with --dtype bf16 at stage 3: for hardware that does not multiply bf16."
        ),
    ] = None,
    clip: Annotated[
        float, typer.Option(help="Largest global gradient norm; 0 for no clipping.", min=0.0)
    ] = 1.0,
    prefetch: Annotated[int, typer.Option(help="Stage 3: units to gather ahead of use.")] = 1,
    overlap_step: Annotated[
        bool,
        typer.Option(
            "--overlap-step", help="Update in the background, in the order of the next forward."
        ),
    ] = False,
    overlap_backward: Annotated[
        bool,
        typer.Option(
            "--overlap-backward", help="Update in the background of backward too; changes no bit."
        ),
    ] = False,
    delay_update: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps before each update begins to count one step later, which hides it and changes numbers.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**62), max=2**62)] = 0,
    sample: Annotated[
        int, typer.Option(min=0, help="Bytes of text to generate before and after; 0 for none.")
    ] = 240,
    check: Annotated[
        bool, typer.Option("--check", help="Train plain PyTorch beside it and print both losses.")
    ] = False,
    save_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps between checkpoints in OUT/checkpoints, written in the background; 0 for none.",
        ),
    ] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on from a checkpoint: a folder, or auto for the newest in OUT/checkpoints if there is one."
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Record the third to fifth step: OUT/profile/trace.json and timeline.png.",
        ),
    ] = False,
) -> None:
    """Train a byte-level GPT, or a mixture of experts, on real text. Data parallel: torchrun --nproc_per_node 2 -m zk train.

    Ctrl-C and SIGTERM: the step in progress is finished, a checkpoint saved, and the exit code is 0. A second Ctrl-C ends the run at once.
    """
    options = dict(locals())
    from zk.tools.train.run import Job
    from zk.tools.train.run import train as run
    from zk.tools.train.sizes import config_of

    with mendable("train"):
        sizes = {
            name: options[name]
            for name in ("layers", "width", "heads", "context")
            if options[name] is not None
        }
        if overlap_backward:
            options["overlap_step"] = "backward"
        zero = zero_config(options, clip_grad_norm=clip or None)
        run(
            chosen(
                Job, options, data=tuple(data or ()), model=config_of(model, 128, sizes), zero=zero
            )
        )


@app.command()
def plan() -> None:
    """Say what of a model fits where, and how long a step takes, without training."""


@app.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="What save_checkpoint was given, or the folder of one step.",
            exists=True,
            file_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: as each parameter was trained.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as plain safetensors files, with its own parameter names."""
    from zk.checkpoint.export import export as run
    from zk.core.options import parse_dtype, parse_nbytes

    with mendable("export"):
        done = run(
            checkpoint,
            out,
            None if dtype is None else parse_dtype(dtype, "--dtype"),
            parse_nbytes(shard_size, "--shard-size"),
        )
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    typer.echo(f"{done.num_tensors} tensors, {done.nbytes / 1e9:.3f} GB in {files}: {out}")
    if done.not_there:
        typer.echo(
            f"{done.not_there} frozen parameters are not in the checkpoint (save_checkpoint(frozen=False)), nor here"
        )
    if done.entries:
        typer.echo(
            f"{done.entries[0]} and {len(done.entries) - 1} more, which modules add to state_dict() themselves, are not in the checkpoint, nor here: "
            "codes are of use over the base that they are from (optimizer.consolidated_state_dict() has all of it)"
        )
    for name, kept in done.tied.items():
        typer.echo(
            f"{name} is tied to {kept}, and written once (safetensors.torch.load_model knows)"
        )


@app.command()
def doctor(
    path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder for the nvme tier, whose drive is measured; repeatable."),
    ] = None,
) -> None:
    """Check this machine for problems and suggest fixes. Exit code 1 if something must be fixed."""
    from rich.console import Console
    from rich.table import Table

    from zk.tools import doctor as checks

    table = Table("", "", "found", "what to do", box=None, pad_edge=False)
    must, shown = False, ""
    for row in (
        *checks.packages(),
        *checks.machine(),
        *(row for one in path or () for row in checks.drive(one)),
    ):
        style = "red" if row.must else "yellow" if row.to_do else ""
        table.add_row(row.part * (row.part != shown), row.what, row.found, row.to_do, style=style)
        must, shown = must or row.must, row.part
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else 140  # a file has no width
    console.print(table)
    raise typer.Exit(int(must))
