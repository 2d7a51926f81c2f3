"""One HTML page about a pruned model or a comparison; no torch but where the model itself is read."""
