"""What can only be one of a few words: the types of such options, which records have too."""

from typing import Literal

#: Which windows of a text.
Order = Literal["first", "random"]
#: Where to use TF32: for Gram matrices of half-precision activations, for all products, or for none.
TF32 = Literal["auto", "always", "never"]
#: How ``export`` writes a model: without its zeros, as packed integers, or as a file for llama.cpp.
ExportFormat = Literal["packed", "compressed-tensors", "gguf-f16", "gguf-q8_0", "gguf-q4_0"]
#: What healing trains: all weights that are left, factors of low rank, norms and biases, or one block after the other;
#: "auto" is what memory is for.
HealingMethod = Literal["auto", "full", "lora", "norms", "blocks"]
