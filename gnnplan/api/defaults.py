"""The graph that is asked about by default. --help shows it, so nothing is imported here."""

DEFAULT_GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
