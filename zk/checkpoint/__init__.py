"""Checkpoints: written by name, read at any world size, stage, tier and dtype."""

from zk.checkpoint.files import CheckpointError

__all__ = ["CheckpointError"]
