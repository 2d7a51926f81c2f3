"""Model directories of safetensors; nothing here knows of transformers."""
