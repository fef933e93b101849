"""Changes to a model before training: deferred construction, weights from files, tiles, activations."""
