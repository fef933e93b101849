"""The report of `make gpu`, made of the rows of its parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpu_common import GIB
from gpu_plan import Row, of

from zk.placement import readable

FIRST_LOSS = 1e-4  # relative difference between systems; only the forward pass decides it
# tokens per second; parameters, for the operations
PUBLISHED = (
    ("14B", "LLMQ, one H100, bf16, state on the host, 512K tokens per step (arXiv 2512.15306)", 6321, 14.77e9),
    ("7B", "LLMQ, one H100, no offload (arXiv 2512.15306)", 13863, 7.616e9),
)


def read(path: Path) -> list[Row]:
    """Rows of a file, without a line that was cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table, or a sentence where there are no rows."""
    body = ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body, ""] if body else ["Not measured.", ""]


def heading(rows: Sequence[Row], command: str) -> list[str]:
    """Machine, versions and command."""
    found = of(rows, "machine")
    if not found:
        return ["# The machine was not described", ""]
    here = found[-1]
    return [
        f"# {here['gpu']}, {here['time'][:10]}",
        "",
        f"{here['device_nbytes'] / GIB:.0f} GiB ({here['free_nbytes'] / GIB:.0f} free), compute capability {here['capability']}, driver "
        f"{here['driver']}, PCIe {here['pcie']}; {here['cores']} cores ({here['cpu']}), {here['host_nbytes'] / GIB:.0f} GiB of host memory, "
        f"Linux {here['linux']}; Python {here['python']}, torch {here['torch']}, CUDA {here['cuda']}, triton {here['triton']}, cupy "
        f"{here['cupy']}, numba {here['numba']}. Command: `{command}`",
        "",
        *(["**A dry run: tiny sizes. No figure means anything.**", ""] if here["dry"] else []),
    ]


def fits(rows: Sequence[Row]) -> list[str]:
    """Planned memory of each job."""
    table = []
    for row in of(rows, "plan"):
        lacks = ", ".join(f"{readable(nbytes)} of {tier} too few" for tier, nbytes in row["missing"].items())
        cap = f" of {readable(row['cap'])}" if row["cap"] else ""
        where = (readable(row["device_nbytes"]) + cap, readable(row["host_nbytes"]), row["refused"] or lacks or "yes", row["note"])
        table.append((f"{row['section']}/{row['name']}", row["model"], f"{row['numel'] / 1e9:.2f}B", f"{max(row['tokens']):,}", *where))
    head = ("job", "model", "parameters", "most tokens", "device", "host", "fits", "how")
    note = "By `zk plan`, before anything runs. Of the device 92% are to be used, of host memory 90%. Activations are an estimate."
    return ["## What fits", "", note, "", *markdown(head, table)]


def floors(rows: Sequence[Row]) -> list[str]:
    """Rates of the machine."""
    table: list[tuple[str, str]] = []
    for row in rows:
        kind = row["kind"]
        if kind == "copy":
            table.append((f"link, {row['system']}, {row['direction']}", f"{row['gbps']:.1f} GB/s"))
        elif kind == "pin":
            seconds = f"{row['lock_s']:.2f} s" + (f", after {row['touch_s']:.2f} s to touch it" if row["touch_s"] else "")
            table.append((f"pin {readable(row['nbytes'])}, {row['system']}", seconds))
        elif kind == "triad":
            table.append((f"host triad, {row['threads']} threads", f"{row['gbps']:.1f} GB/s"))
        elif kind == "cpu adam":
            table.append((f"CPU Adam ({row['engine']}), {row['threads']} threads", f"{row['billion_per_s']:.2f}e9 parameters/s"))
        elif kind == "matmul":
            table.append((f"bf16 matrices of {row['size']}", f"{row['tflops']:.0f} TFLOP/s"))
        elif kind == "device copy":
            table.append(("copy within the device, read and written", f"{row['gbps']:.0f} GB/s"))
        elif kind == "drive":
            table.append((f"drive, {row['direction']}, {'O_DIRECT' if row['direct'] else 'through the page cache'}", f"{row['gbps']:.2f} GB/s"))
        elif kind == "failed" and "what" in row:
            table.append((row["what"], f"failed: {row['reason']}"))
    unlocked = any(row["system"] == "zk, pinned" and not row["page_locked"] for row in of(rows, "copy"))
    note = ["zk's host memory was **not page-locked**: the system refused.", ""] if unlocked else []
    return ["## Floors", "", *note, *markdown(("what", "rate"), table), *_ends(rows, ("floors",))]


def _ends(rows: Sequence[Row], sections: Sequence[str]) -> list[str]:
    """Jobs of these sections that did not end well."""
    ended = [row for row in of(rows, "outcome") if row["section"] in sections and row["outcome"] != "done"]
    lines = [f"- {row['section']}/{row['name']}: {row['outcome']}" for row in ended]
    return [*lines, ""] if lines else []


def tests(rows: Sequence[Row]) -> list[str]:
    """Verdicts of pytest."""
    lines = []
    for row in of(rows, "tests"):
        lines.append(f"- {row['name']}: {row['summary']}")
        if row["tail"]:
            lines += ["", "```", *row["tail"], "```", ""]
    return ["## Bits", "", *(lines or ["Not measured."]), "", *_ends(rows, ("bits", "tests"))]


def wrong(rows: Sequence[Row], plan: Row, step: Row) -> str:
    """Why the speed of a step is worth nothing. Empty if it is worth something."""
    if not step["sound"]:
        return "the losses are not finite, or did not fall"
    alike = {(row["section"], row["name"]) for row in of(rows, "plan", model=plan["model"])}
    losses = {(row["section"], row["name"]): row["loss"] for row in of(rows, "first") if (row["section"], row["name"]) in alike}
    mine, reference = losses[plan["section"], plan["name"]], next(iter(losses.values()))
    if not abs(mine - reference) <= FIRST_LOSS * abs(reference):
        return f"the first loss is {mine:.6g}, that of {next(iter(losses))[1]} is {reference:.6g}"
    return ""


def steps(rows: Sequence[Row]) -> list[str]:
    """Speed and memory of each system, and the reason where there is none."""
    gemm = of(rows, "matmul")
    table: list[Sequence[object]] = []
    plans = {(plan["section"], plan["name"]): plan for plan in of(rows, "plan")}
    sound = {}  # model, system, tokens -> seconds
    for step in of(rows, "step"):
        plan = plans[step["section"], step["name"]]
        if plan["system"] in ("torch", "fsdp2") and not wrong(rows, plan, step):
            sound[plan["model"], plan["system"], step["tokens"]] = step["median"]
    for plan in plans.values():
        where = {"section": plan["section"], "name": plan["name"]}
        outcome = next((row for row in of(rows, "outcome", **where)), {"outcome": "not run", "host_nbytes": 0})
        for tokens in plan["tokens"]:
            first = (plan["model"], f"{tokens:,}", plan["name"])
            step = next(iter(of(rows, "step", tokens=tokens, **where)), None)
            reason = outcome["outcome"] if step is None else wrong(rows, plan, step)
            if step is None or reason:
                table.append((*first, "", reason, *[""] * 8))
                continue
            seconds = step["median"]
            tflops = 6 * plan["numel"] * tokens / seconds / 1e12
            ceiling, peer = (sound.get((plan["model"], system, tokens)) for system in ("torch", "fsdp2"))
            share = f"{ceiling / seconds:.3f}" if ceiling else f"{tflops / gemm[-1]['tflops']:.3f} of matrices" if gemm else ""
            notes = [plan["note"], *step["notes"]]
            notes += [f"{name.removesuffix('_nbytes')} {readable(round(nbytes))} a step" for name, nbytes in step["moved"].items() if nbytes]
            table.append(
                (
                    *first,
                    f"{tokens / seconds:,.0f}",
                    f"{tflops:.1f}",
                    share,
                    f"{peer / seconds:.2f}" if peer else "",
                    f"{seconds:.3f}",
                    f"{step['backward_seconds']:.3f}",
                    readable(step["device_nbytes"]),
                    readable(step["reserved_nbytes"]),
                    readable(max(step["rss_nbytes"], outcome["host_nbytes"])),
                    "; ".join(filter(None, notes)),
                )
            )
    published = [(model, "", name, f"{rate:,}", f"{6 * numel * rate / 1e12:.0f}", *[""] * 8) for model, name, rate, numel in PUBLISHED]
    head = ("model", "tokens", "system", "tokens/s", "TFLOP/s at 6N", "of no offload", "x FSDP2", "s/step", "forward, backward")
    head += ("device", "reserved", "host", "how")
    note = (
        "bf16, every block recomputed in backward, gradients clipped to a norm of 1, random tokens; the median of steps after a warm-up step. N "
        "counts all parameters. Of no offload: plain torch's seconds over these, or where it was not measured the TFLOP/s over those of large "
        "matrices. Device: peak of "
        "tensors. Reserved: peak of what torch's allocator took for them. Host: peak of the process, or of the system beyond its start."
    )
    return ["## Training steps", "", note, "", *markdown(head, [*table, *published])]


def kernels(rows: Sequence[Row]) -> list[str]:
    """Kernels beside plain torch."""
    found = of(rows, "kernels")
    table = []
    for row in found[-1]["rows"] if found else ():
        rate = f"{row['gbps']:.0f} GB/s" if "gbps" in row else f"{row['tflops']:.0f} TFLOP/s"
        table.append((row["name"], f"{row['median_s'] * 1e3:.3f}", rate, f"{row['fraction_of_floor']:.2f}"))
    return ["## Kernels", "", *markdown(("kernel", "median ms", "rate", "of floor"), table), *_ends(rows, ("kernels",))]


def seconds(rows: Sequence[Row]) -> list[str]:
    """Seconds of each job, and host memory that it did not give back."""
    table = []
    for row in of(rows, "outcome"):
        built = next((f"{one['seconds']:.1f}" for one in of(rows, "built", section=row["section"], name=row["name"])), "")
        kept = f"{readable(row['kept_nbytes'])} of host memory were not given back" if row.get("kept_nbytes", 0) > GIB else ""
        table.append((f"{row['section']}/{row['name']}", f"{row['seconds']:.1f}", built, row["outcome"], kept))
    whole = sum(row["seconds"] for row in of(rows, "outcome"))
    return ["## Seconds", "", *markdown(("job", "s", "of them to build", "outcome", ""), table), f"{whole:.0f} s in all.", ""]


def report(rows: Sequence[Row], command: str) -> str:
    """The whole report."""
    lines = heading(rows, command)
    parts: tuple[Callable[[Sequence[Row]], list[str]], ...] = (fits, floors, tests, steps, kernels, seconds)
    for part in parts:
        try:
            lines += part(rows)
        except Exception as error:  # the other tables are still wanted
            lines += [f"(This part of the report failed: {type(error).__name__}: {error})", ""]
    return "\n".join(lines).rstrip() + "\n"
