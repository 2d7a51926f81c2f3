"""Healing: training what is left of a pruned model."""
