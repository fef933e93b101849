"""The subcommands of `python -m zk bench`, each of which prints a table, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zk.tools.terminal import chosen, mendable, table, wide, zero_config

if TYPE_CHECKING:
    from zk.bench.clock import Report

app = typer.Typer(no_args_is_help=True, help="What this machine does, in seconds: drive, CPU Adam, link, kernels, a training step.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that each is timed.")]
_FLOORS = {"copy_gbps": "GB/s of a copy in memory, read and written", "matmul_tflops": "Tflop/s of a matrix product"}
# columns for what the rows have of it: heading, unit, format
_COLUMNS = {
    "median_s": ("median ms", 1e-3, ".2f"),
    "p20_s": ("p20", 1e-3, ".2f"),
    "p80_s": ("p80", 1e-3, ".2f"),
    "gbps": ("GB/s", 1, ".3g"),
    "tflops": ("Tflop/s", 1, ".3g"),
    "tokens_per_s": ("tokens/s", 1, ".3g"),
    "ns_per_parameter": ("ns/param", 1, ".3g"),
    "fraction_of_floor": ("of floor", 1, ".2f"),
}


def _print(found: Report, as_json: bool) -> None:
    import json

    from rich.console import Console

    from zk.offload.tiers import readable

    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    console = wide(Console(highlight=False))
    console.print("measured first, for the floor: " + ", ".join(f"{value:.3g} {_FLOORS[name]}" for name, value in found.floor.items()))
    rows, columns = found.rows, {"": [row["name"] for row in found.rows]}
    for name, (heading, unit, form) in _COLUMNS.items():
        columns[heading] = [f"{row[name] / unit:{form}}" if name in row else "" for row in rows]
    columns["peak memory"] = [readable(row["peak_nbytes"]) if "peak_nbytes" in row else "" for row in rows]
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    printed = table("", [""], filter(None, shown))
    for cells in zip(*shown.values(), strict=True):
        printed.add_row(*cells)
    console.print(printed)


@app.command()
def io(
    path: Annotated[Path, typer.Argument(help="Folder on the drive. What is written there is removed.")],
    size: Annotated[str, typer.Option(help="Bytes of the file, such as 4GiB.")] = "1GiB",
    block: Annotated[str, typer.Option(help="Largest transfer, a multiple of 4 KiB.")] = "4MiB",
    depth: Annotated[int, typer.Option(min=1, help="Transfers at once.")] = 4,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Files of the nvme tier, written and read past the page cache."""
    with mendable("bench io"):
        from zk.bench.io import measure
        from zk.core.memory import in_memory
        from zk.core.options import parse_nbytes

        found = measure(str(path), parse_nbytes(size, "--size"), parse_nbytes(block, "--block"), depth, rounds)
        if in_memory(path):
            typer.secho(f"{path} is host memory, not a drive: what follows is no rate of one", err=True, fg="yellow")
        _print(found, as_json)


@app.command()
def adam(
    numel: Annotated[int, typer.Option(min=1, help="Parameters.")] = 10_000_000,
    rounds: Rounds = 9,
    as_json: Json = False,
) -> None:
    """The CPU update, by zk's engines and by torch's fused and foreach AdamW with the casts they need."""
    with mendable("bench adam"):
        from zk.bench.adam import measure

        _print(measure(numel, rounds), as_json)


@app.command()
def link(
    size: Annotated[str, typer.Option(help="Bytes of a copy.")] = "256MiB",
    rounds: Rounds = 9,
    as_json: Json = False,
) -> None:
    """Copies between host and GPU, page-locked and pageable. Exit code 2 where there is no GPU."""
    with mendable("bench link"):
        from zk.bench.link import measure
        from zk.core.options import parse_nbytes

        _print(measure(parse_nbytes(size, "--size"), rounds), as_json)


@app.command()
def kernels(
    numel: Annotated[int, typer.Option(min=64, help="Elements.")] = 1 << 27,
    size: Annotated[int, typer.Option(min=64, help="Rows and columns of matrices.")] = 4096,
    rounds: Rounds = 15,
    as_json: Json = False,
) -> None:
    """Each Triton kernel beside plain torch. Exit code 2 where there is no GPU."""
    with mendable("bench kernels"):
        from zk.bench.clock import the_gpu

        the_gpu()  # before Triton is imported, which may be missing too
        from zk.bench.kernels import measure

        _print(measure(numel, size, rounds), as_json)


@app.command()
def step(
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=1)] = 512,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 128,
    vocab: Annotated[int, typer.Option(min=2)] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    stage: Annotated[int, typer.Option(help="ZeRO stage.")] = 3,
    param_tier: Annotated[str | None, typer.Option(help="device, host, nvme or auto. Default: host at stage 3.")] = None,
    optimizer_tier: Annotated[str, typer.Option(help="device, host, nvme or auto.")] = "host",
    nvme_path: Annotated[list[Path] | None, typer.Option(help="Folder on the drive, for the nvme tier; may be repeated.")] = None,
    device_budget: Annotated[str | None, typer.Option(help="Device memory for training state.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory for training state.")] = None,
    state_dtype: Annotated[str, typer.Option(help="Adam's moments: fp32, bf16 or 8bit.")] = "fp32",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    overlap_step: Annotated[bool, typer.Option("--overlap-step", help="Update in the background.")] = False,
    plain: Annotated[bool, typer.Option(help="Train plain torch too, to compare with; not for models that it cannot hold.")] = True,
    rounds: Rounds = 10,
    as_json: Json = False,
) -> None:
    """One training step of a GPT with a ZeroConfig, beside plain torch: seconds and peak memory, each in a process of its own."""
    options = dict(locals())
    with mendable("bench step"):
        from zk.bench.step import measure
        from zk.tools.gpt import GPTConfig

        _print(measure(chosen(GPTConfig, options), zero_config(options), batch, rounds, plain), as_json)
