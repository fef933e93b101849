"""Plans before anything is trained: what of a model fits where on a machine, and how long a step takes. `python -m zk plan`."""
