"""Strategies that train on the full graph, layer by layer, all ranks together.

    graph_parallel.py   graph parallelism; with staleness 1 it is PipeGCN
    granndis.py         GraNNDis: servers recompute rows instead of receiving them
    step.py             the operations of one step: one list, which the next two files read
    account.py          bytes, and seconds without contention
    schedule.py         every rank's tasks, for the simulator and the executor
    memory.py           bytes that a rank holds, moment by moment

Mini-batch strategies and P3 use the same `Op`, `account` and `build_schedule`.
"""
