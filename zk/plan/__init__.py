"""What of a model fits where on a machine, and how long a step takes there, before anything is trained. `python -m zk plan`."""
