"""Plans before anything is trained: what of a model fits where on a machine, and how long a step takes. `python -m zk plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a rank computes in a step. Default: 8192.")] = None,
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
    from zk.tools.terminal import wide

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
    tokens = tokens or 8192
    shape, path = adapted(shape_of(model), adapters, base, dtype), nvme_path or "/path/on/the/drive"
    shape = dataclasses.replace(shape, optimizer=optimizer.lower())
    side: str | float = float(update_on) if update_on.replace(".", "", 1).isdecimal() else update_on
    found = choose.plan(shape, machine, tokens, dtype, state_dtype, path, accumulate, side, compute_dtype)
    if as_json:
        typer.echo(json.dumps(choose.as_dict(found), indent=1))
    else:
        report.print_plan(wide(Console()), found)
    if plot:
        pictures = map(str, picture.draw(found, plot))
        typer.echo("\n".join(pictures) or "no pictures: matplotlib is not installed (pip install zk-offload[plot])", err=True)
    raise typer.Exit(0 if found.best else 1)
