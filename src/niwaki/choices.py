"""What can only be one of a few words: the types of such options, which records have too; and names, without torch."""

from typing import Literal

#: Which windows of a text.
Order = Literal["first", "random"]
#: Where to use TF32: for Gram matrices of half-precision activations, for all products, or for none.
TF32 = Literal["auto", "always", "never"]
#: How ``export`` writes a model: without its zeros, as packed integers, or as a file for llama.cpp.
ExportFormat = Literal["packed", "compressed-tensors", "w8a8", "fp8", "gguf", "gguf-f16", "gguf-q8_0", "gguf-q4_0"]
#: What runs a compressed model; Ollama has the files of llama.cpp.
Runtime = Literal["niwaki", "llama.cpp", "ollama", "vllm", "transformers"]
#: What healing trains: all weights that are left, factors of low rank, norms and biases, or one block after the other;
#: "auto" is what memory is for.
HealingMethod = Literal["auto", "full", "lora", "norms", "scales", "blocks"]

#: The names of ``niwaki.stages.STAGES``, as a test checks, each with the parameter that may stand without its name.
FIRST_PARAMETERS = {
    "vocabulary": "size",
    "shrink": "",
    "prune": "pattern",
    "quantize": "grid",
    "heal": "",
    "embeddings": "grid",
    "pack": "",
    "export": "format",
}
#: The names of ``niwaki.layer.solvers.SOLVERS``, for help that does not wait for torch; a test compares them. The first
#: is the default. Solvers choose a mask and weights for it, a mask alone, or weights for a mask.
SOLVER_NAMES = ("continuation", "admm-grad", "alps", "sparsegpt", "double-sparse")
MASK_NAMES = ("magnitude", "wanda", "ria")
WEIGHT_NAMES = ("admm1", "adam", "sgd", "cg", "exact")
#: How the text of a pattern of two sparse factors begins, in config.json and records too.
TWO_FACTORS = "two-factors"
#: In the place of a solver, where weights are only rounded.
NEAREST = "nearest"
#: And where rounding is fitted to the inputs that weights meet.
LEAST_SQUARES = "least squares"
#: In the place of a pattern, where weights are only rounded.
NO_ZEROS = "no zeros"
#: Patterns of each kind, as they are written; the same test reads them.
PATTERN_NAMES = ("2:4", "unstructured:0.6", "per-row:0.6", "two-factors:0.5")
#: The types of numbers that llama.cpp has, as grids for weights: the bits of each weight, those of its scales included.
BLOCK_TYPE_BITS = {
    "q2_k": 2.625, "q3_k": 3.4375, "iq4_xs": 4.25, "q4_k": 4.5, "iq4_nl": 4.5, "q4_0": 4.5, "q4_1": 5.0,
    "q5_k": 5.5, "q5_0": 5.5, "q5_1": 6.0, "q6_k": 6.5625, "q8_0": 8.5,
}  # fmt: skip
#: Grids of floating-point numbers of four bits, and how many weights share a scale.
FLOAT_GRIDS = {"nvfp4": 16, "mxfp4": 32}
#: How long OpenMP's threads wait by spinning, which takes the core from the thread that they wait for when another
#: program is busy (docs/methods.md). Briefly costs nothing measurable, except between the small products of one token.
SPINS, BRIEFLY, LONG = "GOMP_SPINCOUNT", "1000", "10000"
