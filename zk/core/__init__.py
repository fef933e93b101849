"""Parts of a step: units, stores, updates, precision."""
