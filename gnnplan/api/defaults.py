"""The default graph. --help shows its name, so this file imports nothing and loads at once."""

DEFAULT_GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
