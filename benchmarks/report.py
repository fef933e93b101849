"""Turn pytest-benchmark's JSON into a dated table. usage: python benchmarks/report.py RESULTS.json > benchmarks/results/NAME.md"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(run: dict[str, Any]) -> str:
    """One row for each benchmark, slowest last, with the ratio to the fastest zk row of its group."""
    machine = run["machine_info"]
    lines = [
        f"# {run['datetime'][:10]}, {machine['cpu'].get('brand_raw', machine['processor'])}, {machine['cpu'].get('count', '?')} cores",
        "",
        f"Python {machine['python_version']}. Medians of one run.",
        "",
    ]
    rows = sorted(run["benchmarks"], key=lambda row: row["stats"]["median"])
    best = min((row["stats"]["median"] for row in rows if "[zk_split_master]" in row["name"]), default=rows[0]["stats"]["median"])
    extra = list(rows[0]["extra_info"])
    lines.append("| benchmark | median ms | " + " | ".join(extra) + " | times zk_split_master |")
    lines.append("|---|" + "---|" * (len(extra) + 2))
    for row in rows:
        median = row["stats"]["median"]
        cells = [row["param"] or row["name"], f"{median * 1e3:.1f}", *(str(row["extra_info"].get(key, "")) for key in extra), f"{median / best:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
