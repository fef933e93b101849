"""Monitoring: summaries, rates, progress, live views and reports of training."""
