"""The main job of `python -m zk train`: a byte-level GPT on real text."""
