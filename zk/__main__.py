"""`python -m zk`."""

from zk.cli import app

app(prog_name="python -m zk")
