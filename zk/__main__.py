"""`python -m zk`."""

from zk.tools.cli import app

app(prog_name="python -m zk")
