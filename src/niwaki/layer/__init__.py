"""One matrix: the problem, the patterns, the solvers. Tensors only; nothing of transformers or files."""
