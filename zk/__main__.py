"""`python -m zk`."""

from zk.tools.cli import main

main()
