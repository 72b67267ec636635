"""The four networks. Modules hold weights only; every state is a value outside them (see ``state``)."""

import os

# On CUDA MLX multiplies float32 matrices in TF32 unless this is 0, with errors that change codes. It is read at the
# first product, so it is set before any; a value that is there already stays.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
