"""The problem that a plan answers: a graph, a workload, a cluster and ranks.

    problem.py    the problem, and what strategies ask about its graph
    known.py      what has been computed about problems
    fitted.py     presets with the constants that were fitted to print
    inputs.py     cluster and workload from presets, YAML files, options and --set

Imports `vocabulary`, `cluster`, `gnn`, `graph` and `ownership`."""
