"""Models without their zeros: the format, the kernels, and models of transformers that compute with it."""
