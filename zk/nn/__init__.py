"""Changes to a model before training: deferred construction, weights of files, tiles, activations."""
