"""The command line, `python -m zk`; `--help` lists the commands."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from zk.bench.commands import app as bench
from zk.tools.terminal import chosen, mendable, table, wide, zero_config

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."
)


app.add_typer(bench, name="bench")


@app.callback()
def main() -> None:
    """ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # a character that the locale does not have ends no run


@app.command()
def train(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text to learn from; may be repeated. Default: Python's own documentation and sources.", exists=True, dir_okay=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the model, the report, and what zk watch reads.")] = Path("runs/latest"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 800,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and micro-batch.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    accumulation: Annotated[
        str, typer.Option(help="Their order: horizontal, one after the other; vertical, block by block; auto, vertical where state rests elsewhere.")
    ] = "auto",
    model: Annotated[
        str, typer.Option(help="gpt:125m; moe:100m or moe:30b-a3b, mixtures of experts; or sizes: gpt:width=512, moe:experts=64,used=2.")
    ] = "gpt:layers=6",
    layers: Annotated[int | None, typer.Option(min=1, help="Of the model; so are the next two. Default: as --model has it.")] = None,
    width: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Bytes the model sees at once. Default: as --model has it, or 128.")] = None,
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
    state_dtype: Annotated[str, typer.Option(help="Adam's moments: fp32; bf16, which halves them; or 8bit.")] = "fp32",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 where the hardware multiplies it, else fp32.")] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="fp32, with --dtype bf16 at stage 3: for hardware that does not multiply bf16.")] = None,
    clip: Annotated[float, typer.Option(help="Largest global gradient norm; 0 for no clipping.", min=0.0)] = 1.0,
    prefetch: Annotated[int, typer.Option(help="Stage 3: units to gather ahead of use.")] = 1,
    overlap_step: Annotated[bool, typer.Option("--overlap-step", help="Update in the background, in the order of the next forward.")] = False,
    overlap_backward: Annotated[bool, typer.Option("--overlap-backward", help="Update in the background of backward too; changes no bit.")] = False,
    delay_update: Annotated[
        int | None, typer.Option(min=0, help="Steps before each update begins to count one step later, which hides it and changes numbers.")
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**62), max=2**62)] = 0,
    sample: Annotated[int, typer.Option(min=0, help="Bytes of text to generate before and after; 0 for none.")] = 240,
    check: Annotated[bool, typer.Option("--check", help="Train plain PyTorch beside it and print both losses.")] = False,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints in OUT/checkpoints, written in the background; 0 for none.")] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint: a folder, or auto for the newest in OUT/checkpoints if there is one.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record one step: trace.json, timeline.png, and how much was hidden behind compute.")
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
        sizes = {name: options[name] for name in ("layers", "width", "heads", "context") if options[name] is not None}
        if overlap_backward:
            options["overlap_step"] = "backward"
        zero = zero_config(options, clip_grad_norm=clip or None)
        run(chosen(Job, options, data=tuple(data or ()), model=config_of(model, 128, sizes), zero=zero))


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(help="gpt:10b, moe:30b-a3b, gpt:layers=24,width=2048, llama:8b, gpt-oss:20b, a Hugging Face config.json, or module:factory."),
    ],
    gpu: Annotated[str | None, typer.Option(help="Memory of each rank's GPU, such as 32GiB; none without one. Default: this machine's.")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of one machine. Default: this machine's.")] = None,
    nvme: Annotated[str, typer.Option(help="Room on the drive of one machine, such as 1TiB; none without one.")] = "none",
    world: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
    per_machine: Annotated[int | None, typer.Option(min=1, help="Ranks that share a machine's RAM, CPU and drive. Default: up to 8.")] = None,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks, of which each has its part of every block; neighbours.")] = 1,
    replicate: Annotated[int, typer.Option(min=1, help="Replicas of the states, each over --world / --tensor / --replicate ranks.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a rank computes in a step. Default: 8192, or --sequence.")] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one sequence, trained with zk.long_context: no logits, tiles, checkpoints in host memory.")
    ] = None,
    sequence_tiles: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a tile: sequences go through the model tile by tile (zk.sequence_tiles). Divides --sequence.")
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches that the tokens of a step come in.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    compute_dtype: Annotated[str | None, typer.Option(help="fp32: parameters rest in --dtype, and are gathered and computed with in fp32.")] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="adamw, adam, sgd (with momentum), lion, muon (with AdamW beside), adafactor, nadam, radam, rmsprop or adagrad."),
    ] = "adamw",
    state_dtype: Annotated[str, typer.Option(help="Adam's moments: fp32, bf16 or 8bit.")] = "fp32",
    adapters: Annotated[
        str | None, typer.Option(help="Train adapters over the frozen model: rank=16, of LoRA on all linear layers of its blocks.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Linear layers of the frozen model: nf4, int8, fp8, or as --dtype. Default: what its config.json says.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="1e12 operations/s that the model's matrix products reach on a rank. Default: 100 on a GPU, 0.15 for each core without."),
    ] = None,
    link: Annotated[float, typer.Option(help="GB/s between host and GPU, each way.")] = 20.0,
    cpu_adam: Annotated[float, typer.Option(help="CPU update of one machine, 1e9 parameters/s.")] = 2.5,
    host_memory: Annotated[
        float | None, typer.Option(help="GB/s of one machine's memory, reads and writes together. Default: what --cpu-adam takes of it.")
    ] = None,
    update_on: Annotated[
        str, typer.Option(help="Side that updates state which rests in other memory than the GPU's: host, device, auto, or the GPU's share.")
    ] = "auto",
    disk: Annotated[float, typer.Option(help="GB/s of one machine's drive, reads and writes together.")] = 3.0,
    fabric: Annotated[float, typer.Option(help="GB/s between ranks, for each.")] = 20.0,
    network: Annotated[float | None, typer.Option(help="GB/s between machines, for each rank. Default: as --fabric.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure --cpu-adam here, --disk in --nvme-path, and --link where there is a GPU, in seconds.")
    ] = False,
    nvme_path: Annotated[
        str | None, typer.Option(help="Folder on the drive, for --measure (default: this one) and the recommended configuration.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what of a model fits where, and how long a step takes, without training or a GPU. The exit code is 1 where nothing fits."""
    import dataclasses
    import json

    import torch
    from rich.console import Console

    from zk.core.memory import host_memory as ram_here
    from zk.core.options import parse_nbytes
    from zk.offload.cpu_adam import default_threads
    from zk.tools.plan import choose, picture, report
    from zk.tools.plan import measure as rates
    from zk.tools.plan.adapters import adapted
    from zk.tools.plan.shape import shape_of
    from zk.tools.plan.speed import Machine

    with mendable("plan"):
        if gpu is None:
            gpu = str(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else "none"
        if tflops is None:
            tflops = 100.0 if gpu != "none" else 0.15 * default_threads()
        given = {"tflops": tflops, "link": link, "cpu-adam": cpu_adam, "host-memory": host_memory, "disk": disk, "fabric": fabric, "network": network}
        for option, rate in given.items():
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"--{option} must be a rate above 0; got {rate}")
        if measure:
            cpu_adam, disk = rates.measure_cpu_adam(), rates.measure_disk(nvme_path or ".") if nvme != "none" else disk
            link = rates.measure_link() if gpu != "none" and torch.cuda.is_available() else link
        machine = Machine(
            gpu_nbytes=None if gpu == "none" else parse_nbytes(gpu, "--gpu"),
            ram_nbytes=parse_nbytes(ram, "--ram") if ram is not None else ram_here()[0],
            nvme_nbytes=0 if nvme == "none" else parse_nbytes(nvme, "--nvme"),
            world=world,
            per_machine=min(world, per_machine or 8),
            tflops=tflops,
            link_gbps=link,
            cpu_adam=cpu_adam,
            memory_gbps=host_memory,
            disk_gbps=disk,
            fabric_gbps=fabric,
            network_gbps=network,
            tensor=tensor,
            replicas=replicate,
        )
        tokens = tokens or (sequence * accumulate if sequence else 8192)
        if sequence and tokens % (sequence * accumulate):
            raise ValueError(f"--tokens must be whole sequences in each micro-batch, of --sequence {sequence}; got {tokens} in {accumulate}")
        if sequence_tiles and (not sequence or sequence % sequence_tiles):
            raise ValueError(f"--sequence-tiles must divide --sequence, which it cuts; got {sequence_tiles} and {sequence or 'no --sequence'}")
        shape, path = adapted(shape_of(model), adapters, base, dtype), nvme_path or "/path/on/the/drive"
        shape = dataclasses.replace(shape, sequence=sequence or 0, tile=sequence_tiles or 0, optimizer=optimizer.lower())
        side: str | float = float(update_on) if update_on.replace(".", "", 1).isdecimal() else update_on
        pieces = accumulate * (sequence // sequence_tiles if sequence and sequence_tiles else 1)
        found = choose.plan(shape, machine, tokens, dtype, state_dtype, path, pieces, side, compute_dtype)
        if as_json:
            typer.echo(json.dumps(choose.as_dict(found), indent=1))
        else:
            report.print_plan(wide(Console()), found)
        if plot:
            pictures = map(str, picture.draw(found, plot))
            typer.echo("\n".join(pictures) or "no pictures: matplotlib is not installed (pip install zk-offload[plot])", err=True)
    raise typer.Exit(0 if found.best else 1)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as zk train's --out.")],
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end. So it is where there is no terminal.")] = False,
) -> None:
    """Show a run while it trains: memory by tier, where the time of a step goes, rates, and what would make it faster."""
    import contextlib

    from rich.console import Console
    from rich.live import Live

    from zk.tools.monitor.watch import frames, on_terminal, text

    console = Console(highlight=False, markup=False)
    with mendable("watch"):
        if once or not console.is_terminal:
            typer.echo(text(next(iter(frames(run)))))
            return
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            for found in frames(run):
                live.update(on_terminal(found), refresh=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as zk train's --out.")],
    out: Annotated[Path | None, typer.Option(help="The file to write, or its folder. Default: report.html beside the run.")] = None,
) -> None:
    """Write a run as one HTML file: loss, memory by tier, where the time went, configuration, and the plan against what was measured."""
    from zk.tools.monitor.report import write

    with mendable("report"):
        typer.echo(write(run, out))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="What save_checkpoint was given, or the folder of one step.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: as each parameter was trained.")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as plain safetensors files, with its own parameter names."""
    from zk.checkpoint.export import export as run
    from zk.core.options import parse_dtype, parse_nbytes

    with mendable("export"):
        done = run(checkpoint, out, None if dtype is None else parse_dtype(dtype, "--dtype"), parse_nbytes(shard_size, "--shard-size"))
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    typer.echo(f"{done.num_tensors} tensors, {done.nbytes / 1e9:.3f} GB in {files}: {out}")
    if done.not_there:
        typer.echo(f"{done.not_there} frozen parameters are not in the checkpoint (save_checkpoint(frozen=False)), nor here")
    if done.entries:
        typer.echo(
            f"{done.entries[0]} and {len(done.entries) - 1} more, which modules add to state_dict() themselves, are not in the checkpoint, nor here: "
            "codes are of use over the base that they are from (optimizer.consolidated_state_dict() has all of it)"
        )
    for name, kept in done.tied.items():
        typer.echo(f"{name} is tied to {kept}, and written once (safetensors.torch.load_model knows)")


@app.command("import-deepspeed")
def import_deepspeed(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What DeepSpeed's save_checkpoint was given, or one tag in it (global_stepN).")],
    out: Annotated[Path, typer.Argument(help="Folder for the zk checkpoint, as given to save_checkpoint; made if it is not there.")],
) -> None:
    """Turn a DeepSpeed ZeRO checkpoint into one that ZeroOptimizer.load_checkpoint(OUT) goes on from, at any stage, tier and world size."""
    from zk.checkpoint.deepspeed import import_deepspeed as run

    with mendable("import-deepspeed"):
        typer.echo(run(directory, out))


@app.command()
def doctor(
    path: Annotated[list[Path] | None, typer.Option(help="Folder on a drive, for the nvme tier; may be repeated. Its rate is measured.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one object for each row.")] = False,
) -> None:
    """Check this machine for training, and name what stands in the way, with the remedy. Exit code 1 if something has to be mended."""
    import dataclasses
    import json

    from rich.console import Console

    from zk.tools import doctor as checks
    from zk.tools.plan.measure import measure_disk

    findings = checks.examine(path or (), measure_disk)
    if as_json:
        typer.echo(json.dumps(findings, default=dataclasses.asdict, indent=1))
    else:
        rows = table("", ())
        for heading in ("", "", "found", "what to do"):
            rows.add_column(heading, overflow="fold")
        styles, part = {"ok": "", "note": "yellow", "mend": "red"}, ""
        for finding in findings:
            shown, part = finding.part if finding.part != part else "", finding.part
            rows.add_row(shown, finding.what, finding.found, finding.remedy, style=styles[finding.verdict])
        wide(Console(highlight=False)).print(rows)
    if any(finding.verdict == "mend" for finding in findings):
        raise typer.Exit(1)
