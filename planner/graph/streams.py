"""Streams of random numbers: what is drawn for one purpose says nothing about another.

A stream is the first number of a seed: `default_rng((EXPANSION, seed, server))`. Numbers are never
reused, for a run must draw tomorrow what it draws today.
"""

EXPANSION = 1  # GraNNDis: external neighbours of a server's part
BATCHES = 2  # GraNNDis: training vertices of its batches
BATCH_ORDER = 3  # GraNNDis: which batch a step takes
SEEDS = 4  # mini-batches: the order of training vertices
BOUNDARY = 5  # boundary node sampling: halo rows that are sent
EDGES = 6  # link prediction: the order of edges
HELD_OUT = 7  # link prediction: edges for validation and test, and what they are compared with
ROUNDING = 8  # rows that cross in few bits: which way their numbers are rounded
TILES = 9  # tensor3d: the two orders of the vertices
