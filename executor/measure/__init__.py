"""`gnnplan measure`: micro-benchmarks whose results become a cluster file.

Which file to open:

    measure.py      starts the ranks that measure, or is one of them
    microbench.py   what a rank measures, and in which order; kernels, training steps, the sampler
    messages.py     how ranks time something together; exchanges
    rehearsal.py    short trainings that correct what single kernels promise
    fitting.py      from all ranks' samples to the numbers of the cost model

This room may import all rooms of the executor.
"""
