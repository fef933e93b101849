"""In: a Plan. Out: tables on the console."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from zk.plan.choose import Option, Plan, as_python, shown
from zk.plan.memory import USABLE, Machine
from zk.plan.shape import Shape

TIERS = ("device", "host", "nvme")
_WORDS = {"device": "GPU", "host": "host", "nvme": "drive"}
_KINDS = {
    "param": "parameters",
    "grad": "gradients",
    "master": "master (what bf16 lacks)",
    "moments": "Adam's moments",
    "param_copy": "copies, to update elsewhere",
    "gathered": "units in use",
    "bucket": "gradients leaving",
    "fresh": "a gradient being made",
    "buffer": "buffers of the drive",
    "staging": "gradients on their way to the drive",
    "spare": "room for fp32 gradients, pages",
    "activations": "activations (estimate)",
}


def size(nbytes: int) -> str:
    """ "1.5 GiB"; nothing for nothing."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):,.1f} {unit}"
    return f"{nbytes:,} B" if nbytes else ""


def count(num_params: int) -> str:
    """ "1.34B"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if num_params >= scale:
            return f"{num_params / scale:.3g}{unit}"
    return str(num_params)


def seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{1e3 * value:.2g} ms"


def print_plan(console: Console, plan: Plan) -> None:
    """All of it."""
    console.print(f"[bold]{plan.shape.name}[/]: {count(plan.shape.num_params)} parameters, {_described(plan.shape)}", highlight=False)
    console.print(_machine(plan.machine, plan.tokens), highlight=False, style="dim")
    console.print(_choices(plan))
    if plan.best is None:
        console.print("[bold red]Nothing fits.[/] Add memory, ranks or a drive, or train fewer tokens at once.")
    else:
        _recommend(console, plan, plan.best)
    _largest(console, plan)
    console.print(
        "Bytes are what the optimizer allocates; activations are an estimate, with every block checkpointed. Times are a model of what overlaps, "
        "from the rates above: not measured.",
        style="dim",
    )


def _described(shape: Shape) -> str:
    return f"{shape.layers} blocks, width {shape.width}" if shape.width else f"{shape.layers} blocks"


def _machine(machine: Machine, tokens: int) -> str:
    gpu = "no accelerator" if machine.gpu_nbytes is None else f"{size(machine.gpu_nbytes)} of GPU"
    ranks = f"{machine.world} ranks, {machine.per_machine} on each machine: " if machine.world > 1 else ""
    use = ", ".join(f"{share:.0%} of {what}" for what, share in zip(("GPU", "RAM", "drive"), USABLE.values(), strict=True))
    return (
        f"{ranks}{gpu}, {size(machine.ram_nbytes)} of RAM, {size(machine.nvme_nbytes) or 'none'} of drive ({use} to be used); {tokens:,} tokens "
        f"a step and rank\n{machine.tflops:g} TFLOP/s, link {machine.link_gbps:g} GB/s each way, CPU Adam {machine.cpu_adam:.3g}e9 parameters/s, "
        f"drive {machine.disk_gbps:.3g} GB/s, between ranks {machine.fabric_gbps:g} GB/s"
    )


def _choices(plan: Plan) -> Table:
    table = Table(title="each rank", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("stage", "params", "optimizer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GPU", "host", "drive"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", min_width=len("GiB host"))  # the one that gives way on a narrow terminal
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for option in plan.options:
        config, found = option.config, option.found
        cells = [str(config.stage), config.param_tier, config.optimizer_tier, *(size(found.on(tier)) for tier in TIERS)]
        lacks = [f"-{size(nbytes)} {_WORDS[tier]}" for tier, nbytes in option.missing.items()]
        fits = "yes" if option.fits else ", ".join(lacks)
        style = "bold green" if option is plan.best else None if option.fits else "dim"
        table.add_row(*cells, fits, seconds(option.step.seconds), option.step.bound, style=style)
    return table


def _recommend(console: Console, plan: Plan, best: Option) -> None:
    step, found = best.step, best.found
    rate = plan.tokens * plan.machine.world / step.seconds
    console.print(f"\n[bold green]Recommended[/]: {seconds(step.seconds)} a step ({rate:,.0f} tokens/s), bound by {step.bound}", highlight=False)
    console.print(as_python(best.config), soft_wrap=True)
    console.print(json.dumps(shown(best.config)), soft_wrap=True, style="dim")
    busy = ", ".join(f"{name} {seconds(value)}" for name, value in step.busy.items() if value)
    console.print(f"busy: {busy}; phases: {', '.join(f'{name} {seconds(value)}' for name, value in step.phases.items())}", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("GPU", "host", "drive"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, words in _KINDS.items():
        row = [found.sizes.get((tier, kind), 0) for tier in TIERS]
        if any(row):
            table.add_row(words, *map(size, row))
    console.print(table)


def _largest(console: Console, plan: Plan) -> None:
    table = Table(title="\nlargest model of this shape", title_justify="left", box=None, pad_edge=False)
    for heading in ("with nothing beyond", "parameters", "blocks", "width", "choice"):
        table.add_column(heading, no_wrap=heading != "choice")
    for tier, (shape, config) in plan.largest.items():
        choice = f"stage {config.stage}, parameters {config.param_tier}, optimizer {config.optimizer_tier}"
        table.add_row(tier, count(shape.num_params), str(shape.layers), str(shape.width), choice)
    console.print(table)
