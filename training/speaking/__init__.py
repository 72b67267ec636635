"""Training of the speech decoder: rows as they are served, NeMo's mixture loss, generation, export."""

import os

# Training multiplies in TF32, which the core switches off before its first product: a gradient need not be exact.
os.environ.setdefault("MLX_ENABLE_TF32", "1")
