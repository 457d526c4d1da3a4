"""The planning problem: a graph, a workload, a cluster and a number of ranks.

    problem.py    the problem, and the layouts, batches and chunks of its graph; their cache
    inputs.py     cluster and workload from presets, YAML files, options and --set; constants of
                  presets that were fitted to figures printed in papers

Imports `vocabulary`, `cluster`, `gnn`, `graph` and `ownership`."""
