"""Devices for tests and benchmarks. Nothing else in the package imports them."""
