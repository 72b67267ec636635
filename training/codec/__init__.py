"""Training of the speech codec: its forward passes over whole batches, quantizer, losses, judges, and the run."""
