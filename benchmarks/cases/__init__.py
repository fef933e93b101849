"""Jobs that the benchmarks time, each checked against plain torch first."""
