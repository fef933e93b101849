"""What a step is made of: units, stores, updates, precision."""
