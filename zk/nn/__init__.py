"""Changes to a model before training: tiles, deferred construction, pretrained weights, activations."""
