"""In: the lines of JSON that the parts of `make gpu` wrote. Out: the report: what was asked and what was measured, then every table.

A ratio is cut off, never rounded up. A system whose losses are not those of the others has no speed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
Row = dict[str, Any]
# of the first loss, which only the forward pass decides, and of the next ones: backward of attention adds up in any order
FIRST_LOSS, LATER_LOSSES, LOSSES = 1e-4, 2e-3, 3

NAMES = {
    "torch": "plain torch, all on the device",
    "fsdp2_offload": "FSDP2, CPUOffloadPolicy",
    "zk_device": "zk, all on the device",
    "zk_stage2": "zk stage 2, optimizer on the host",
    "zk_stage2_overlap": "zk stage 2, optimizer on the host, overlap_step",
    "zk_stage3": "zk stage 3, all on the host",
    "zk_stage3_overlap": "zk stage 3, all on the host, overlap_step",
    "zk_nvme": "zk stage 3, all on NVMe",
    "zk_nvme_overlap": "zk stage 3, all on NVMe, overlap_step",
    "zk_nvme_part": "zk stage 3, optimizer on host and NVMe",
}


def read(path: Path) -> list[Row]:
    """The rows of a file; a line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def cut(value: float, digits: int = 3) -> str:
    """``value`` with so many digits after the point, the rest cut off."""
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table, or nothing where there are no rows."""
    body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body, ""] if body else ["Not measured.", ""]


class Results:
    """Rows, by what is asked of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, kind: str, **values: object) -> list[Row]:
        """Rows of a kind with these values."""
        return [row for row in self.rows if row.get("kind") == kind and all(row.get(name) == value for name, value in values.items())]

    def last(self, kind: str, **values: object) -> Row | None:
        """The latest of them."""
        found = self.of(kind, **values)
        return found[-1] if found else None

    def reference(self, model: str, tokens: int) -> Row | None:
        """What other systems' losses are compared with, of those that began with so many tokens."""
        first = [row for row in self.of("step", model=model, tokens=tokens, position=0) if row["sound"]]
        return next((row for name in ("zk_device", "torch", *NAMES) for row in first if row["system"] == name), None)

    def disagreement(self, row: Row) -> str:
        """Why a row's speed is worth nothing; empty if it is worth something."""
        if not row["sound"]:
            return "the losses are not finite, or did not fall"
        first = next((other for other in self.of("step", section=row["section"], job=row["job"], position=0) if other["model"] == row["model"]), row)
        reference = self.reference(row["model"], first["tokens"])
        if reference is None or reference is first:
            return ""
        for index, (got, want) in enumerate(list(zip(first["losses"], reference["losses"], strict=False))[:LOSSES]):
            if not abs(got - want) <= (LATER_LOSSES if index else FIRST_LOSS) * abs(want):
                return f"loss {index} is {got:.6g}, that of {reference['system']} is {want:.6g}"
        return ""

    def step(self, system: str, tokens: int, model: str = "1.3B", section: str | None = None) -> Row | None:
        """A step whose losses are right."""
        found = self.of("step", system=system, tokens=tokens, model=model, **({"section": section} if section else {}))
        return next((row for row in reversed(found) if not self.disagreement(row)), None)

    def no_offload(self, tokens: int, model: str = "1.3B") -> Row | None:
        """The faster of the two systems that keep all on the device."""
        found = [row for name in ("torch", "zk_device") if (row := self.step(name, tokens, model)) is not None]
        return min(found, key=lambda row: row["median"]) if found else None

    def why_not(self, section: str, job: str | None = None) -> str:
        """Why there is no figure."""
        reasons = [row["reason"] for row in self.of("failed", section=section) if job in (None, row["job"])]
        reasons += [row["outcome"] for row in self.of("outcome", section=section) if job in (None, row["job"]) and row["outcome"] != "done"]
        return f"not measured: {reasons[0]}" if reasons else "not measured"


# ---- what was asked ----------------------------------------------------------------------------------------------------------


def verdict(results: Results, models: tuple[str, str] = ("1.3B", "7B"), tokens: int = 65536, cap: int = 32 * GIB) -> list[str]:
    """One row for each thing that is asked of a run on a GPU."""
    rows: list[tuple[str, str, str, str]] = []

    def add(what: str, asked: str, met: bool | None, measured: str) -> None:
        rows.append((what, asked, measured, "not measured" if met is None else "met" if met else "**not met**"))

    for direction, name in (("down", "device to host"), ("up", "host to device"), ("both", "both at once")):
        floor = max((row["gbps"] for row in results.of("copy", system="torch", direction=direction)), default=0.0)
        ours = results.last("copy", system="zk transfer", direction=direction)
        if ours is None or not floor:
            add(f"copies, {name}", "0.9 of the link", None, results.why_not("link"))
        else:
            ratio = ours["gbps"] / floor
            add(f"copies, {name}", "0.9 of the link", ratio >= 0.9, f"{cut(ratio)} ({cut(ours['gbps'], 1)} of {floor:.1f} GB/s)")
    size = f"{models[0]}, {tokens >> 10}K tokens" if tokens >= 1024 else f"{models[0]}, {tokens} tokens"
    base, peer = results.no_offload(tokens, models[0]), results.step("fsdp2_offload", tokens, models[0])
    for system, how in (("zk_stage2", "stage 2, host optimizer"), ("zk_stage2_overlap", "the same, overlap_step (exact)")):
        ours = results.step(system, tokens, models[0])
        for other, asked, least, section in ((base, "0.85 of no offload", 0.85, "step"), (peer, "2 x FSDP2, CPU offload", 2.0, "peers")):
            what = f"{how}: {size}"
            if ours is None or other is None:
                add(what, asked, None, results.why_not("step" if ours is None else section, system if ours is None else None))
            else:
                ratio = other["median"] / ours["median"]
                add(what, asked, ratio >= least, f"{cut(ratio)} ({ours['median']:.3f} s, {NAMES[other['system']]} {other['median']:.3f} s)")
    capped = [row for row in results.of("step", section="seven", cap=cap) if not results.disagreement(row)]
    what = f"{models[1]} trains under {cap / GIB:.0f} GiB" if cap >= GIB else f"{models[1]} trains under a cap"
    if capped:
        most = max(row["reserved_nbytes"] for row in capped)
        where = ", ".join(f"{row['tokens']} tokens" for row in capped)
        add(what, f"{cap / GIB:.0f} GiB", most <= cap, f"peak {most / GIB:.2f} GiB reserved; {where}")
    else:
        add(what, f"{cap / GIB:.0f} GiB", None, results.why_not("seven"))
    return markdown(("what", "asked", "measured", ""), rows)


# ---- tables ------------------------------------------------------------------------------------------------------------------


def heading(results: Results, date: str) -> list[str]:
    """Where and with what."""
    machine = results.last("machine")
    if machine is None:
        return [f"# {date}", "", "The machine was not described.", ""]
    return [
        f"# {machine['gpu']}, {date}",
        "",
        f"{machine['device_nbytes'] / GIB:.0f} GiB ({machine['free_nbytes'] / GIB:.0f} free), compute capability {machine['capability']}, driver "
        f"{machine['driver']}, PCIe {machine['pcie']}; {machine['cores']} cores ({machine['cpu']}), {machine['host_nbytes'] / GIB:.0f} GiB of host "
        f"memory, Linux {machine['linux']}; Python {machine['python']}, torch {machine['torch']}, CUDA {machine['cuda']}, triton "
        f"{machine['triton']}, cupy {machine['cupy']}, numba {machine['numba']}. Command: `make gpu`",
        "",
    ]


def link(results: Results) -> list[str]:
    """Copies by size."""
    lines = ["## Link, GB/s", ""]
    sizes = sorted({row["nbytes"] for row in results.of("copy", system="torch")})
    table = []
    for nbytes in sizes:
        cells: list[object] = [f"{nbytes >> 20} MiB"]
        for direction in ("down", "up", "both"):
            found = [results.last("copy", system=system, direction=direction, nbytes=nbytes) for system in ("torch", "zk")]
            cells += [f"{row['gbps']:.1f}" if row else "" for row in found]
        table.append(cells)
    ours = {direction: results.last("copy", system="zk transfer", direction=direction) for direction in ("down", "up", "both")}
    if any(ours.values()):
        cells = ["Transfer, in its pieces"]
        for row in ours.values():
            cells += ["", f"{row['gbps']:.1f}" if row else ""]
        table.append(cells)
    head = ("pieces of", "down, torch", "down, zk", "up, torch", "up, zk", "both, torch", "both, zk")
    lines += markdown(head, table)
    pinned = results.last("pinned")
    if pinned is not None and not pinned["pinned"]:
        lines += ["zk's host memory was **not page-locked**: the system refused.", ""]
    lines += ["torch: pinned memory, a stream for each direction. zk: Arena and Transfer. Both: the sum of both directions.", ""]
    return lines


def machine(results: Results) -> list[str]:
    """Ceilings."""
    rows: list[Sequence[object]] = []
    for row in results.of("triad"):
        rows.append((f"host triad, {row['system']}, {row['threads']} threads", f"{row['gbps']:.1f} GB/s"))
    for row in results.of("cpu adam"):
        rows.append((f"CPU Adam, {row['engine']}, {row['threads']} threads", f"{row['ns_per_param']:.3f} ns per parameter, {row['gbps']:.1f} GB/s"))
    for row in results.of("matmul"):
        rows.append((f"bf16 matrices of {row['size']}", f"{row['tflops']:.0f} TFLOP/s"))
    for row in results.of("device copy"):
        rows.append(("copy within the device", f"{row['gbps']:.0f} GB/s"))
    for row in results.of("disk"):
        how = "O_DIRECT" if row["direct"] else "through the page cache"
        rows.append((f"drive, {'write' if row['write'] else 'read'} {row['nbytes'] / GIB:.1f} GiB, {how}", f"{row['gbps']:.2f} GB/s"))
    return ["## What the machine can do", "", *markdown(("what", "rate"), rows)]


def steps(results: Results, sections: Sequence[str], title: str, note: str) -> list[str]:
    """Speed and memory of each system."""
    found = [row for section in sections for row in results.of("step", section=section)]
    order = list(NAMES)
    table = []
    for row in sorted(found, key=lambda row: (row["model"], row["tokens"], order.index(row["system"]), row["cap"] or 0)):
        wrong = results.disagreement(row)
        base, peer = results.no_offload(row["tokens"], row["model"]), results.step("fsdp2_offload", row["tokens"], row["model"])
        name = NAMES[row["system"]] + (f", cap {row['cap'] / GIB:.0f} GiB" if row["cap"] else "")
        name += ", activations on the host" if row["activations_offloaded"] else ""
        speed: list[object] = [f"no speed: {wrong}", "", "", "", "", "", ""]
        if not wrong:
            speed = [
                f"{row['median']:.3f}",
                f"{row['backward_seconds']:.3f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tflops']:.1f}",
                f"{row['hardware_tflops']:.1f}",
                cut(base["median"] / row["median"]) if base else "",
                cut(peer["median"] / row["median"], 2) if peer else "",
            ]
        memory = [f"{row[name] / GIB:.2f}" for name in ("device_nbytes", "reserved_nbytes")]
        memory.append(f"{max(row['rss_nbytes'], row['host_more_nbytes']) / GIB:.1f}")
        moved = row["moved"]
        drive = f"{moved['fetched_nbytes'] / 1e9:.1f} / {moved['evicted_nbytes'] / 1e9:.1f}" if moved.get("fetched_nbytes") else ""
        table.append((row["model"], f"{row['tokens']:,}", name, *speed, *memory, drive, row["note"]))
    head = ("model", "tokens", "system", "s/step", "forward, backward", "tokens/s", "TFLOP/s (6N)", "with recompute (8N)")
    head += ("of no offload", "x FSDP2", "device GiB", "reserved GiB", "host GiB", "drive GB in / out", "")
    lines = [f"## {title}", "", note, "", *markdown(head, table)]
    lines += agreement(results, found)
    lines += unmeasured(results, sections)
    return lines


def agreement(results: Results, found: Sequence[Row]) -> list[str]:
    """How far the systems' losses are apart."""
    lines = []
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in found if row["position"] == 0):
        reference = results.reference(model, tokens)
        others = [row for row in found if (row["model"], row["tokens"], row["position"]) == (model, tokens, 0) and row is not reference]
        if reference is None or not others:
            continue
        pairs = [(got, want) for row in others for got, want in list(zip(row["losses"], reference["losses"], strict=False))[:LOSSES]]
        worst = max(abs(got - want) / abs(want) for got, want in pairs)
        same = [row["system"] for row in others if row["losses"][:LOSSES] == reference["losses"][:LOSSES]]
        lines.append(
            f"Losses of {model}, {tokens} tokens: those of {reference['system']} fall from {reference['losses'][0]:.4f} to "
            f"{reference['losses'][LOSSES - 1] if len(reference['losses']) >= LOSSES else reference['losses'][-1]:.4f} in {LOSSES} steps; the other "
            f"{len(others)} systems are within {worst:.1e} of them (allowed: {FIRST_LOSS:g} in the first, {LATER_LOSSES:g} after it), the same bits: "
            f"{', '.join(same) or 'none'}."
        )
    return [*lines, ""] if lines else []


def unmeasured(results: Results, sections: Sequence[str]) -> list[str]:
    """Jobs that did not end well."""
    lines = []
    for section in sections:
        failed = results.of("failed", section=section)
        lines += [f"- {section}/{row['job']}: {row['reason']}" for row in failed]
        said = {row["job"] for row in failed}
        ended = [row for row in results.of("outcome", section=section) if row["outcome"] != "done" and row["job"] not in said]
        lines += [f"- {section}/{row['job']}: {row['outcome']}" for row in ended]
    return ["Not measured, or not all of it:", "", *dict.fromkeys(lines), ""] if lines else []


def caps(results: Results) -> list[str]:
    """The largest model under each cap."""
    table = []
    for bound in results.of("bound"):
        cap = bound["cap"]
        fits = [row for row in results.of("step") if row["cap"] and row["cap"] <= cap and not results.disagreement(row)]
        best = max(fits, key=lambda row: (row["numel"], -row["cap"], row["tokens"]), default=None)
        measured = "nothing"
        if best is not None:
            measured = f"{best['numel'] / 1e9:.2f}B, {best['tokens']} tokens in {best['median']:.2f} s, peak "
            measured += f"{best['reserved_nbytes'] / GIB:.2f} GiB reserved"
            measured += f" (under {best['cap'] / GIB:.0f} GiB)" if best["cap"] != cap else ""
        what = "state beside the working set" if bound["spare"] else "working set only"
        table.append((f"{cap / GIB:.0f} GiB", f"{bound['numel'] / 1e9:.2f}B ({what})", measured))
    note = (
        "The bound is arithmetic: 90% of the host's memory at 14 bytes per parameter, and what the cap leaves beside a step's working set, at "
        "14 bytes too. No drive is used. Each model that is named took real steps."
    )
    return ["## The largest model under a cap", "", note, "", *markdown(("cap", "bound", "trained"), table), *unmeasured(results, ("caps",))]


def tests(results: Results) -> list[str]:
    """What pytest said."""
    lines = ["## Tests on the GPU", ""]
    for row in results.of("tests"):
        lines.append(f"- {row['job']}: {row['summary']}")
        if row["returncode"]:
            lines += ["", "```", *row["tail"], "```", ""]
    return [*lines, "", *unmeasured(results, ("tests",))]


def kernels(results: Results) -> list[str]:
    """The tables of the kernel benchmarks."""
    row = results.last("kernels")
    lines = ["## Kernels", ""]
    if row is not None:
        lines += [row["markdown"].replace("\n## ", "\n### "), ""]
        lines += ["Some failed:", "", "```", *row["tail"], "```", ""] if row["returncode"] else []
    return [*lines, *unmeasured(results, ("kernels",))]


def timelines(results: Results) -> list[str]:
    """What was hidden, where it was recorded."""
    lines: list[str] = []
    for row in results.of("timeline"):
        cells = [(r["resource"], f"{r['busy_ms']:.1f}", f"{r['hidden_ms']:.1f}", f"{r['busy_ms'] - r['hidden_ms']:.1f}") for r in row["overlap"]]
        lines += [f"### {row['section']}/{row['job']}, {row['tokens']} tokens, one step of {row['whole_ms']:.0f} ms (recorded, so slower)", ""]
        lines += markdown(("resource", "busy ms", "behind compute", "exposed"), cells)
        spent = sorted(row["training_thread"].items(), key=lambda item: -item[1])
        lines += ["Training thread: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in spent) + ".", ""]
    return ["## Timelines", "", *lines] if lines else []


def seconds(results: Results) -> list[str]:
    """What the run itself took."""
    rows: list[Sequence[object]] = []
    for section in dict.fromkeys(row["section"] for row in results.of("outcome")):
        found = results.of("outcome", section=section)
        budget = results.last("budget", section=section)
        ended = [row for row in found if row["outcome"] == "done"]
        jobs = ", ".join(f"{row['job']} {row['seconds']:.0f}" for row in found)
        given, used = f"{budget['seconds']:.0f}" if budget else "", sum(row["seconds"] for row in found)
        rows.append((section, given, f"{used:.0f}", len(ended), len(found), jobs))
    whole = sum(row["seconds"] for row in results.of("outcome"))
    lines = ["## Seconds", "", *markdown(("section", "budget", "used", "jobs done", "of", "each"), rows)]
    return [*lines, f"{whole:.0f} s in all. What a section leaves over goes to those after it.", ""]


def report(rows: Sequence[Row], date: str, **asked: Any) -> str:
    """The whole report."""
    results = Results(rows)
    lines = heading(results, date)
    if any(row.get("dry") for row in rows):
        lines += ["**A dry run: tiny sizes on a CPU whose link is pretended. No figure means anything.**", ""]
    lines += ["## Asked, and measured", "", *verdict(results, **asked)]
    lines += ["Ratios are cut off, not rounded. No offload: the faster of plain torch and zk with all on the device.", ""]
    steps_note = (
        "Random tokens, 2,048 in a row; bf16, blocks recomputed in backward, clipped to a norm of 1. N counts all parameters once (the head is "
        "tied). Medians of warm steps, each with its update; with overlap_step the update is beside the next step. Device: peak of tensors, and "
        "of what torch's allocator took for them (the CUDA context, about half a GiB, is in neither). Host: peak of the process, or what the "
        "system had more in use, whichever is more."
    )
    parts: list[Callable[[], list[str]]] = [
        lambda: tests(results),
        lambda: link(results),
        lambda: machine(results),
        lambda: steps(results, ("step", "peers", "nvme"), "Steps of 1.3B", steps_note),
        lambda: steps(results, ("seven",), "Steps of 7B", "As above; one row of tokens after the other in the same process."),
        lambda: caps(results),
        lambda: kernels(results),
        lambda: timelines(results),
        lambda: unmeasured(results, ("link", "disk", "large")),
        lambda: seconds(results),
    ]
    for part in parts:
        try:
            lines += part()
        except Exception as error:  # the other tables are still wanted
            lines += [f"(This part of the report failed: {type(error).__name__}: {error})", ""]
    return "\n".join(lines).rstrip() + "\n"


def picture(rows: Sequence[Row], path: Path, model: str = "1.3B") -> None:
    """Tokens per second of each system, by tokens per step."""
    from matplotlib.figure import Figure

    results = Results(rows)
    found = [row for row in results.of("step", model=model) if not results.disagreement(row) and row["section"] in ("step", "peers", "nvme")]
    by_tokens = sorted({row["tokens"] for row in found}, reverse=True)
    if not found:
        return
    groups = [[row for name in NAMES for row in found if row["system"] == name and row["tokens"] == tokens] for tokens in by_tokens]
    figure = Figure(figsize=(9, sum(0.7 + 0.32 * len(group) for group in groups)), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[1 + len(group) for group in groups])[:, 0]
    for axis, group, tokens in zip(axes, groups, by_tokens, strict=True):
        colors = ["#228833" if row["system"].startswith("zk") else "#bbbbbb" for row in group]
        names = [row["system"].replace("_", " ") for row in group]
        bars = axis.barh(names, [row["tokens_per_s"] for row in group], color=colors)
        axis.bar_label(bars, [f"{row['tokens_per_s']:,.0f} tokens/s, {row['tflops']:.0f} TFLOP/s" for row in group], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.3)
        axis.set_title(f"{model}, {tokens:,} tokens per step", fontsize=9, loc="left")
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=120)
