"""Changes to a model before training: deferred construction, pretrained weights, tiles."""
