"""Training of the speech decoder: rows as they are served, NeMo's mixture loss, generation, export."""
