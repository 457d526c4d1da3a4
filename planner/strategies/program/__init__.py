"""What ranks do, written once: a strategy's program, and all that is read from it.

    Strategy.program(problem) -> Program -> account.py    bytes, and seconds without contention
                                         -> schedule.py   every rank's tasks
                                         -> traffic()     who sends whom, for placing the ranks
                                         -> memory.py     bytes held at each rank's fullest moment

    program.py    Op, one operation of ranks; Held, its memory; Program, the steps of an epoch
    order.py      the order of operations, and what each waits for
    price.py      what one operation takes, in seconds and bytes
    path.py       seconds without contention: the longest path over lanes and ranks
    memory.py     the fullest moment of operations, and what is there beside them
    account.py    what is predicted: the path, ports and cores that are shared, and bytes

All readers go through the same operations, so bytes, seconds, tasks and memory agree. This room
knows no strategy.
"""
