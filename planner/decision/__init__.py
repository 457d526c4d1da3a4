"""The decision: which strategy to use, where its ranks sit, and why.

    candidate.py       a strategy with its prediction, and whether it fits
    search.py          all candidates, ranked
    room.py            what would make one fit
    recommendation.py  which of them is recommended, and how sure that is
    dtypes.py          which precision rows have (--dtype auto)
    whole.py           the whole training in both modes and on all sizes
    epochs.py          how many epochs a training has
    summary.py         the lines that a plan opens with
    explain.py         all reasons
    sensitivity.py     which links, devices and depths would change the choice
    sweep.py           the decision at many values of some fields
    scale.py           the decision on more and more GPUs: whether to distribute at all
    objective.py       what the best candidate has least of: time, cost, energy
    plan.py            plan.json, written and read
    answer.py          a strategy of a plan with its numbers, or as its best (--strategy NEXT)

The room may import every room of the planner but evidence/.
"""
