"""In: a command line. Out: what it asks for. `python -m zk --help` lists the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."
)


@app.callback()
def main() -> None:
    """ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."""


@app.command()
def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text to learn from; may be repeated. Default: Python's own documentation and sources.", exists=True, dir_okay=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the model and the picture.")] = Path("runs/latest"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 800,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and micro-batch.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=1)] = 256,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    context: Annotated[int, typer.Option(min=2, help="Bytes the model sees at once.")] = 128,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 3e-3,
    stage: Annotated[int, typer.Option(help="ZeRO stage: 0 nothing partitioned, 1 optimizer state, 2 and gradients, 3 and parameters.")] = 3,
    optimizer_tier: Annotated[str, typer.Option(help="Where gradients and optimizer state live: device, host, nvme, auto.")] = "host",
    param_tier: Annotated[
        str | None, typer.Option(help="Where parameters rest between uses: device; at stage 3 also host, nvme, auto. Default: host at stage 3.")
    ] = None,
    nvme_path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder on the drive, for the nvme tier; repeat it to stripe over several.", exists=True, file_okay=False),
    ] = None,
    device_budget: Annotated[str | None, typer.Option(help="Device memory that training state may take; tiers that are auto fill it first.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory that training state may take, such as 4GiB.")] = None,
    state_dtype: Annotated[str, typer.Option(help="Precision of Adam's moments: fp32, or bf16, which halves them.")] = "fp32",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 where the hardware multiplies it, else fp32.")] = None,
    clip: Annotated[float, typer.Option(help="Largest global gradient norm; 0 for no clipping.")] = 1.0,
    prefetch: Annotated[int, typer.Option(help="Stage 3: units to gather ahead of use.")] = 1,
    overlap_step: Annotated[bool, typer.Option("--overlap-step", help="Update beside training, in the order of the next forward.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    sample: Annotated[int, typer.Option(min=0, help="Bytes of text to generate before and after; 0 for none.")] = 240,
    check: Annotated[bool, typer.Option("--check", help="Train plain PyTorch beside it and print both losses.")] = False,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints in OUT/checkpoints, written beside training; 0 for none.")] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint: a folder, or auto for the newest in OUT/checkpoints if there is one.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record one step: trace.json, timeline.png, and how much was hidden behind compute.")
    ] = False,
) -> None:
    """Train a byte-level GPT on real text. Data parallel: torchrun --nproc_per_node 2 -m zk train.

    SIGTERM: the step under way is finished, a checkpoint saved, and the exit code is 0.
    """
    from zk.config import ZeroConfig
    from zk.train.gpt import GPTConfig
    from zk.train.run import Job
    from zk.train.run import train as run

    try:
        if width % heads:
            raise ValueError(f"--width must be a multiple of --heads; got {width} and {heads}")
        zero = ZeroConfig(
            stage=stage,
            dtype=dtype,
            param_tier=param_tier or ("host" if stage == 3 else "device"),  # type: ignore[arg-type]
            optimizer_tier=optimizer_tier,  # type: ignore[arg-type]
            nvme_path=tuple(map(str, nvme_path)) if nvme_path else None,
            device_budget=device_budget,
            host_budget=host_budget,
            state_dtype=state_dtype,
            clip_grad_norm=clip or None,
            prefetch=prefetch,
            overlap_step=overlap_step,
        )
        model = GPTConfig(width=width, layers=layers, heads=heads, context=context)
        run(
            Job(
                data=tuple(data or ()),
                out=out,
                model=model,
                steps=steps,
                batch=batch,
                accumulate=accumulate,
                lr=lr,
                seed=seed,
                sample=sample,
                check=check,
                profile=profile,
                save_every=save_every,
                keep=keep,
                resume=resume,
                zero=zero,
            )
        )
    except (ValueError, OSError) as error:  # what the user can mend; anything else keeps its traceback
        typer.secho(f"zk train: {error}", err=True, fg="red")
        raise typer.Exit(2) from None


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="What save_checkpoint was given, or the folder of one step.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: as each parameter was trained.")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as plain safetensors files, with its own parameter names."""
    from zk.checkpoint.export import export as run
    from zk.config import parse_dtype, parse_nbytes

    try:
        wanted = parse_dtype(dtype, "--dtype") if dtype is not None else None
        done = run(checkpoint, out, wanted, parse_nbytes(shard_size, "--shard-size"))
    except (ValueError, OSError) as error:
        typer.secho(f"zk export: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    typer.echo(f"{done.num_tensors} tensors, {done.nbytes / 1e9:.3f} GB in {files}: {out}")
    for name, kept in done.tied.items():
        typer.echo(f"{name} is tied to {kept}, and written once (safetensors.torch.load_model knows)")


@app.command("import-deepspeed")
def import_deepspeed(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What DeepSpeed's save_checkpoint was given, or one tag in it (global_stepN).")],
    out: Annotated[Path, typer.Argument(help="Folder for the zk checkpoint, as given to save_checkpoint; made if it is not there.")],
) -> None:
    """Turn a DeepSpeed ZeRO checkpoint into one that ZeroOptimizer.load_checkpoint(OUT) goes on from, at any stage, tier and world size."""
    from zk.checkpoint.deepspeed import import_deepspeed as run

    try:
        typer.echo(run(directory, out))
    except (ValueError, OSError) as error:  # what the user can mend; anything else keeps its traceback
        typer.secho(f"zk import-deepspeed: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
