"""Structured pruning: fewer blocks, heads or neurons, in a smaller dense model."""
