"""The files and bytes of a model directory, below transformers and without it."""
