"""Monitoring: summaries, rates, progress, traces, and what Ctrl-C says."""
