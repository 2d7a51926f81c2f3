"""What a run does to a model: plan, solve, fit, write, resume."""
