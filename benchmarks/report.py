"""Turn pytest-benchmark's JSON into dated tables and a picture.

usage: python benchmarks/report.py RESULTS.json [--plot FILE.png] > NAME.md

Where no GPU is, rows of the kernels named zk run their plain PyTorch references: they are marked as
such, as they say nothing about the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
FIRST = ("zk", "zk_split_master", "zk_file")  # rows of zk that others are compared with
LONGEST = 10  # bars end at so many times the fastest


def groups(run: dict[str, Any]) -> dict[str, Rows]:
    """Rows that do the same job, fastest first."""

    def job(row: dict[str, Any]) -> str:
        return str(row["group"] or row["name"].split("[")[0].removeprefix("test_").replace("_", " "))

    rows = sorted(run["benchmarks"], key=lambda row: (job(row), row["stats"]["median"]))
    return {name: list(members) for name, members in itertools.groupby(rows, key=job)}


def system(row: dict[str, Any]) -> str:
    """The system that a row measures."""
    return str((row["params"] or {}).get("system", row["param"] or row["name"]))


def is_reference(row: dict[str, Any]) -> bool:
    """Whether plain PyTorch ran in place of a kernel of zk."""
    return system(row).startswith("zk") and row["extra_info"].get("device") == "cpu"


def label(row: dict[str, Any]) -> str:
    """The system of a row, and whether it is a reference."""
    return f"{system(row)} (reference)" if is_reference(row) else system(row)


def ours(rows: Rows) -> dict[str, Any]:
    """The row that others are compared with: zk's main one, another of zk's, or the fastest."""
    own = [row for row in rows if system(row).startswith("zk")]
    return next((row for row in own if system(row) in FIRST), (own or rows)[0])


def readable(seconds: float) -> str:
    """Seconds in a unit that fits."""
    unit, scale = next(((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3)) if seconds >= scale), ("us", 1e-6))
    return f"{seconds / scale:.3g} {unit}"


def table(run: dict[str, Any]) -> str:
    """One table for each job."""
    machine = run["machine_info"]
    cpu = machine["cpu"]
    lines = [
        f"# {run['datetime'][:10]}, {cpu.get('brand_raw') or machine.get('processor', '')}, {cpu.get('count', '?')} cores",
        "",
        f"`make bench`, Python {machine['python_version']}. Medians of one run.",
    ]
    if any(map(is_reference, run["benchmarks"])):
        lines += ["", "Rows marked *reference* ran in plain PyTorch, not as kernels: no GPU was there."]
    for name, rows in groups(run).items():
        mine = ours(rows)
        extra = list(dict.fromkeys(key for row in rows for key in row["extra_info"]))
        heading = ["system", "median", *extra, f"times {system(mine)}"]
        lines += ["", f"## {name}", "", f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
        for row in rows:
            median = row["stats"]["median"]
            rates = [str(row["extra_info"].get(key, "")) for key in extra]
            cells = [label(row), readable(median), *rates, f"{median / mine['stats']['median']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(run: dict[str, Any], path: Path) -> None:
    """Bars of the time that each system takes, by job: zk's coloured, references hatched."""
    from matplotlib.figure import Figure

    jobs = groups(run)
    heights = [1 + len(rows) for rows in jobs.values()]
    figure = Figure(figsize=(9, 0.35 * sum(heights) + 0.35 * len(jobs)), layout="constrained")
    axes = figure.subplots(len(jobs), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, rows) in zip(axes, jobs.items(), strict=True):
        times = [row["stats"]["median"] for row in rows]
        most = LONGEST * min(times)
        bars = axis.barh(list(map(label, rows)), [min(time, most) for time in times], color="#bbbbbb")
        for bar, row in zip(bars, rows, strict=True):
            if is_reference(row):
                bar.set(hatch="///", facecolor="white", edgecolor="#bbbbbb")
            elif system(row).startswith("zk"):
                bar.set_color("#228833")
        cut = [" (bar cut)" if time > most else "" for time in times]
        texts = [readable(time) + end for time, end in zip(times, cut, strict=True)]
        axis.bar_label(bars, texts, padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    cpu = run["machine_info"]["cpu"].get("brand_raw", "")
    figure.suptitle(f"{cpu}, {run['datetime'][:10]}: time, less is better", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    run = json.loads(options.results.read_text())
    print(table(run))
    if options.plot:
        plot(run, options.plot)


if __name__ == "__main__":
    main()
