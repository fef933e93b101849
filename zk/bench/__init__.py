"""Measurements of this machine, in seconds: `python -m zk bench io|adam|link|kernels|step`. benchmarks/ has the long versions."""
