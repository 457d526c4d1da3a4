"""`gnnplan measure`: micro-benchmarks whose results become a cluster file.

Which file to open:

    measure.py      starts the ranks that measure, or is one of them
    microbench.py   what a rank measures, in which order and how often
    timing.py       how ranks time something together
    computation.py  kernels, training steps, the sampler
    messages.py     exchanges, messages, all-reduce, and transfers beside computation
    rehearsal.py    short trainings that correct what single kernels promise
    fitting.py      from all ranks' samples to the numbers of the cost model

This room may import all rooms of the executor.
"""
