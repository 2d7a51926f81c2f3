"""Training a pruned model on one's own task, with anybody's training loop."""
