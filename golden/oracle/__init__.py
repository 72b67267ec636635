"""The golden generator: NVIDIA's PyTorch classes, small random weights, and what every stage of them computes.

Nothing here imports the packages under test, and nothing numerical is reimplemented: modules are built by
nemo_toolkit and transformers, run unmodified, and recorded through hooks.
"""
