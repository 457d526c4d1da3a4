"""The decision: which strategy to use, where its ranks sit, and why.

    candidate.py   a strategy with its prediction, and whether it fits in memory; the memory or
                   servers with which it would; draws of uncertain predictions: chances, ranges and
                   regrets
    search.py      evaluates all candidates, and ranks them
    choices.py     float32 or rounded rows (--dtype auto); the whole training, full-graph and
                   mini-batch, on all numbers of GPUs
    summary.py     the lines at the beginning of a plan
    explain.py     all reasons for a plan; the links, devices and depths that would change the
                   choice
    sweep.py       the decision at many values of some fields, and on increasing numbers of GPUs
    objective.py   the quantity to minimise: time, cost, energy or value; how many epochs a training
                   has
    plan.py        writes and reads plan.json; a strategy of a plan with its numbers; replaces a
                   plan's best (--strategy)

The room may import every room of the planner except evidence/.
"""
