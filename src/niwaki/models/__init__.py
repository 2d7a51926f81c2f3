"""A model directory, one decoder block in memory at a time; the only place that knows transformers."""
