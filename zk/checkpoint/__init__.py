"""Checkpoints: written by name, read at any number of ranks, stage, tier and dtype."""

from zk.checkpoint.files import CheckpointError

__all__ = ["CheckpointError"]
