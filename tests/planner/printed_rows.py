"""Rows of printed figures for tests."""

import json

from gnnplan.papers.rows import COLUMNS


def row(job: str, **changed: object) -> dict[str, str]:
    """'p3 p3_p100 ogbn-products sage 2x32 4x4 gsplit': paper, testbed, dataset, model, layers x hidden,
    nodes x GPUs of each, strategy; - is not stated."""
    paper, testbed, dataset, model, shape, size, strategy = job.split()
    (layers, hidden), (nodes, gpus) = shape.split("x"), size.split("x")
    named = {"paper": paper, "testbed": testbed, "dataset": dataset, "model": model}
    named |= {"layers": layers, "hidden": hidden, "num_nodes": nodes, "gpus_per_node": gpus}
    named |= {"strategy": strategy, "source": "Table 1", "value": "1", "strategy_params": "{}"}
    told = {name: "" if value == "-" else value for name, value in named.items()} | changed
    texts = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in told.items()}
    return {**dict.fromkeys(COLUMNS, ""), **texts}
