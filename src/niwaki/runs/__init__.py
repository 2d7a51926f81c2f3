"""A run: a list of stages that turn one model directory into another, resumed after an interruption."""
