"""Programs: the operations of all ranks, and the predictions computed from them.

    Strategy.program(problem) -> Program -> account.py    bytes, seconds and peak memory
                                         -> program.py    every rank's tasks, in order; bytes from
                                                          rank to rank, to place ranks

    program.py    Op, one operation of the ranks; Program, an epoch's steps; the order of
                  operations, the dependencies of each, and every rank's tasks
    price.py      seconds and bytes of one operation; seconds without contention: the longest path
                  over lanes and ranks
    account.py    the prediction: the longest path, shared ports and cores, and bytes; peak memory:
                  operations in their order, weights, libraries

All of these files read the same operations, so bytes, seconds, tasks and memory agree. No file
here depends on a particular strategy.
"""
