"""Tables of a plan on the console."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console

from zk.core.words import count, seconds, size
from zk.tools.plan.choose import Option, Plan, as_python, faster, shown
from zk.tools.plan.optimizers import has_kernel
from zk.tools.plan.speed import USABLE
from zk.tools.terminal import table

TIERS = {"device": "GPU", "host": "host", "nvme": "drive"}  # and what they are called
_WIDE = 90  # of a terminal, for the column that the others have no room beside
_KINDS = {
    "param": "parameters",
    "grad": "gradients",
    "sums": "their sums over micro-batches",
    "master": "master (what bf16 lacks)",
    "moments": "Adam's moments",
    "param_copy": "copies, to update elsewhere",
    "shadow": "updates that begin in backward",
    "gathered": "units in use",
    "scales": "scales of 4-bit weights",
    "dequantized": "dequantized weights in use",
    "bucket": "gradients leaving",
    "fresh": "a gradient being made",
    "replicas": "gradients between replicas",
    "buffer": "buffers of the update",
    "staging": "gradients on their way to the drive",
    "spare": "room for sums of gradients, pages",
    "activations": "activations (estimate)",
}


def print_plan(console: Console, plan: Plan) -> None:
    """Print the choices, the best, and the largest model."""
    shape = plan.shape
    width = f", width {shape.width}" if shape.width else ""
    active = f" ({count(shape.num_active)} for each token)" if shape.num_active < shape.num_params else ""
    trained = f", {count(shape.num_trained)} of them trained" if shape.num_trained < shape.num_params else ""
    by = f", by {shape.optimizer}" * (shape.optimizer != "adamw")
    console.print(
        f"[bold]{shape.name}[/]: {count(shape.num_params)} parameters{active}{trained}, {shape.layers} blocks{width}{by}", highlight=False
    )
    console.print(_machine(plan), highlight=False, style="dim")
    rows = table("each rank", ("stage", "params", "optimizer"), TIERS.values())
    rows.padding = (0, 1, 0, 0)
    rows.add_column("fits", min_width=len("GiB host"))  # the one that gives way on a narrow terminal
    rows.add_column("step", justify="right", no_wrap=True)
    if has_room := console.width >= _WIDE:
        rows.add_column("speed", justify="right", no_wrap=True)
    rows.add_column("bound by", no_wrap=True)
    for (*cells, speed, bound), stages, is_best, fits in _folded(plan):
        style = "bold green" if is_best else None if fits else "dim"
        cells += [speed, bound] if has_room else [bound]
        rows.add_row(_stages(stages, plan.best.config.stage if is_best and plan.best else None), *cells, style=style)
    console.print(rows)
    if not plan.best:
        console.print("[bold red]Nothing fits.[/] Add memory, ranks or a drive, or train fewer tokens at once.")
        nearest = min(plan.options, key=lambda option: sum(option.missing.values()), default=None)
        if nearest:
            lacks = " and ".join(f"{size(nbytes)} more of {TIERS[tier]}" for tier, nbytes in nearest.missing.items())
            tiers = f"parameters on {nearest.config.param_tier}, optimizer on {nearest.config.optimizer_tier}"
            console.print(f"The least is missing at stage {nearest.config.stage}, {tiers}: {lacks}.", highlight=False)
    else:
        _recommend(console, plan)
    if plan.largest:
        rows = table("\nlargest model of this shape", ("with nothing beyond", "parameters", "blocks", "width"))
        rows.add_column("choice")
        for tier, (found, config) in plan.largest.items():
            choice = f"stage {config.stage}, parameters {config.param_tier}, optimizer {config.optimizer_tier}"
            rows.add_row(tier, count(found.num_params), str(found.layers), str(found.width), choice)
        console.print(rows)
    console.print(
        "Bytes are what the optimizer allocates; activations are an estimate, with every block checkpointed. Times are a model of what overlaps, "
        "from the rates above: not measured. Speed is a share of that of compute alone, as without offload.",
        style="dim",
    )
    if not has_kernel(shape.optimizer):
        products = ", and Muon's matrix products come on top" * (shape.optimizer == "muon")
        console.print(f"The update of an element is taken to be as fast as Adam's{products}.", style="dim")


def _folded(plan: Plan) -> Iterator[tuple[tuple[str, ...], list[int], bool, bool]]:
    """Rows of the choices: cells, the stages for which they are the same, and whether the best one is among them, and fits."""
    found: dict[tuple[str, ...], list[Option]] = {}
    for option in plan.options:
        lacks = ", ".join(f"-{size(nbytes)} {TIERS[tier]}" for tier, nbytes in option.missing.items())
        tiers = (option.config.param_tier, option.config.optimizer_tier)
        step, sizes = option.step, map(size, map(option.found.on, TIERS))
        cells = (*tiers, *sizes, lacks or "yes", seconds(step.seconds), f"{step.of_no_offload:.0%}", step.bound)
        found.setdefault(cells, []).append(option)
    for cells, options in found.items():
        yield cells, [option.config.stage for option in options], any(option is plan.best for option in options), options[0].fits


def _stages(stages: Sequence[int], best: int | None) -> str:
    """ "0-3", "1,3"; a star at the ``best``, or behind them all."""
    if len(stages) > 1 and list(stages) == list(range(stages[0], stages[-1] + 1)):
        return f"{stages[0]}-{stages[-1]}" + "*" * (best is not None)
    return ",".join(f"{stage}*" if stage == best else str(stage) for stage in stages)


def _machine(plan: Plan) -> str:
    machine = plan.machine
    gpu = "no accelerator" if machine.joined else f"{size(machine.gpu_nbytes or 0)} of GPU"
    meshes = {"replicate": machine.replicas, "shard": machine.shards, "tensor": machine.tensor}
    mesh = f" ({', '.join(f'{name} {extent}' for name, extent in meshes.items() if extent > 1)})" if machine.shards < machine.world else ""
    ranks = f"{machine.world} ranks{mesh}, {machine.per_machine} on each machine: " if machine.world > 1 else ""
    memory = f", host memory {machine.memory_gbps:g} GB/s" if machine.memory_gbps is not None else ""
    network = f", between machines {machine.network_gbps:g} GB/s" if machine.network_gbps is not None else ""
    there = (not machine.joined, True, machine.nvme_nbytes > 0)
    names = zip(("GPU", "RAM", "drive"), USABLE.values(), there, strict=True)
    use = ", ".join(f"{share:.0%} of {what}" for what, share, is_there in names if is_there)
    drive = f"{size(machine.nvme_nbytes)} of drive" if machine.nvme_nbytes else "no drive"
    return (
        f"{ranks}{gpu}, {size(machine.ram_nbytes)} of RAM, {drive} ({use} to be used); {plan.tokens:,} tokens "
        f"a step and rank\n{machine.tflops:g} TFLOP/s, link {machine.link_gbps:g} GB/s each way, CPU Adam {machine.cpu_adam:.3g}e9 "
        f"parameters/s{memory}, drive {machine.disk_gbps:.3g} GB/s, between ranks {machine.fabric_gbps:g} GB/s{network}"
    )


def _orders(console: Console, plan: Plan, best: Option) -> None:
    """Both orders of several micro-batches."""
    assert best.other
    horizontal, vertical = (best.other, best.step) if best.vertical else (best.step, best.other)
    rows = table(f"\n{plan.micro_batches} micro-batches of {plan.tokens // plan.micro_batches:,} tokens", ["order"], ("link", "drive", "step"))
    for order, step in (("one after the other (backward)", horizontal), ("block by block (accumulate)", vertical)):
        style = "bold green" if step is best.step else None
        rows.add_row(order, *(size(step.moved[resource]) for resource in ("link", "disk")), seconds(step.seconds), style=style)
    console.print(rows)


def _recommend(console: Console, plan: Plan) -> None:
    assert plan.best
    step, config = plan.best.step, plan.best.config
    rate = plan.tokens * plan.machine.world / plan.machine.tensor / step.seconds
    console.print(f"\n[bold green]Recommended[/]: {seconds(step.seconds)} a step ({rate:,.0f} tokens/s), bound by {step.bound}", highlight=False)
    console.print(as_python(config), soft_wrap=True)
    console.print(json.dumps(shown(config)), soft_wrap=True, style="dim")
    busy, phases = (", ".join(f"{name} {seconds(value)}" for name, value in times.items() if value) for times in (step.busy, step.phases))
    console.print(f"busy: {busy}; phases: {phases}", highlight=False)
    if helps := faster(plan):
        console.print("faster: " + ", or ".join(f"{what} ({seconds(value)})" for what, value in helps.items()), highlight=False)
    if plan.best.other:
        _orders(console, plan, plan.best)
    if plan.machine.world > 1:
        sources = {"within": "from its machine", "between": "from other machines"}
        came = ", ".join(f"{size(nbytes)} {sources[where]}" for where, nbytes in step.sent.items() if nbytes)
        console.print(f"to each rank in a step: {came}", highlight=False)
    rows = table("", [""], TIERS.values())
    for kind, words in _KINDS.items():
        row = [plan.best.found.sizes[tier, kind] for tier in TIERS]
        if any(row):
            rows.add_row(words if kind != "moments" or has_kernel(plan.shape.optimizer) else "optimizer's state", *map(size, row))
    console.print(rows)
    if (estimate := deepspeed_nbytes(plan, plan.best)) is not None:
        gpu, cpu = map(size, estimate)
        console.print(
            f"DeepSpeed's estimator for this offloading: {gpu} per GPU, {cpu} per CPU (model states alone; it knows no drive)", highlight=False
        )


def deepspeed_nbytes(plan: Plan, option: Option) -> tuple[int, int] | None:
    """Bytes of a GPU and of a host by the formulas of ``estimate_zero2_model_states_mem_needs`` and its sister for stage 3, with their
    defaults (DeepSpeed 0.19); None for what they do not know: no GPU, frozen parameters, tensor parallel ranks.
    """
    shape, machine, config = plan.shape, plan.machine, option.config
    if not has_kernel(shape.optimizer) or machine.joined or shape.num_trained < shape.num_params or machine.tensor > 1:
        return None
    total, largest = shape.num_params, max(numel for unit in shape.units for numel in unit.numels)
    ranks, here, machines = machine.world, machine.per_machine, -(-machine.world // machine.per_machine)
    gpu: float
    cpu: float
    is_off, params_too = config.optimizer_tier != "device", config.param_tier != "device"
    if config.stage < 3:
        gpu, cpu = 2 * total + (0 if is_off else 18 * total / ranks), total * (max(4 * ranks, 16) if is_off else 4 * here)
    elif is_off:
        gpu, cpu = 4 * largest + (0 if params_too else 2 * total / ranks), (18 if params_too else 16) * total / machines
    else:
        gpu, cpu = 4 * largest + 18 * total / ranks, 4 * largest * here
    return int(gpu), int(1.5 * cpu)
