"""The version of niwaki."""

__version__ = "0.1.0"
