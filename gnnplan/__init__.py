"""gnnplan: which parallel strategy to train a graph neural network with, and how well we knew."""

__version__ = "0.2.0.dev0"
