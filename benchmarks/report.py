"""Turn pytest-benchmark's JSON into dated tables, and pictures. usage: python benchmarks/report.py RESULTS.json [--plot FILE.png] > NAME.md"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def groups(run: dict[str, Any]) -> dict[str, Rows]:
    """Rows that do the same job, fastest first."""

    def job(row: dict[str, Any]) -> str:
        return str(row["group"] or row["name"].split("[")[0].removeprefix("test_").replace("_", " "))

    rows = sorted(run["benchmarks"], key=lambda row: (job(row), row["stats"]["median"]))
    return {name: list(members) for name, members in itertools.groupby(rows, key=job)}


def label(row: dict[str, Any]) -> str:
    """The system of a row."""
    return str((row["params"] or {}).get("system", row["param"] or row["name"]))


def ours(rows: Rows) -> dict[str, Any]:
    """The row that others are compared with: the first of zk's in the order of the file, or the fastest of all."""
    own = [row for row in rows if label(row).startswith("zk")]
    return next((row for row in own if label(row) in ("zk", "zk_split_master", "zk_file")), (own or rows)[0])


def table(run: dict[str, Any]) -> str:
    """One table for each job."""
    machine = run["machine_info"]
    lines = [
        f"# {run['datetime'][:10]}, {machine['cpu'].get('brand_raw', machine['processor'])}, {machine['cpu'].get('count', '?')} cores",
        "",
        f"Python {machine['python_version']}. Medians of one run.",
    ]
    if any(row["extra_info"].get("device") == "cpu" for row in run["benchmarks"]):
        lines += ["", "Where the device is cpu, rows named zk run the plain PyTorch references of the kernels, which are not there to be fast."]
    for name, rows in groups(run).items():
        mine = ours(rows)
        extra = list(dict.fromkeys(key for row in rows for key in row["extra_info"]))
        lines += ["", f"## {name}", "", f"| system | median ms | {' | '.join(extra)} | times {label(mine)} |", "|---|" + "---|" * (len(extra) + 2)]
        for row in rows:
            median = row["stats"]["median"]
            cells = [label(row), f"{median * 1e3:.3g}", *(str(row["extra_info"].get(key, "")) for key in extra)]
            lines.append("| " + " | ".join([*cells, f"{median / mine['stats']['median']:.2f}"]) + " |")
    return "\n".join(lines)


def plot(run: dict[str, Any], path: Path) -> None:
    """Bars of the time each system takes, by job, zk's own coloured."""
    from matplotlib.figure import Figure

    jobs = groups(run)
    figure = Figure(figsize=(9, sum(0.7 + 0.32 * len(rows) for rows in jobs.values())), layout="constrained")
    axes = figure.subplots(len(jobs), 1, squeeze=False, height_ratios=[1 + len(rows) for rows in jobs.values()])[:, 0]
    for axis, (name, rows) in zip(axes, jobs.items(), strict=True):
        times = [row["stats"]["median"] * 1e3 for row in rows]
        bars = axis.barh([label(row) for row in rows], times, color=["#228833" if label(row).startswith("zk") else "#bbbbbb" for row in rows])
        axis.bar_label(bars, [f"{time:.3g} ms" for time in times], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(f"{run['machine_info']['cpu'].get('brand_raw', '')}, {run['datetime'][:10]}: milliseconds, less is better", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    run = json.loads(options.results.read_text())
    print(table(run))
    if options.plot:
        plot(run, options.plot)


if __name__ == "__main__":
    main()
