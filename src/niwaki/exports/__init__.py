"""Files that other programs read: GGUF for llama.cpp, compressed-tensors for vLLM."""
