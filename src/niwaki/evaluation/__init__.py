"""What a model is worth: perplexity, tasks, speed, text and comparisons."""
