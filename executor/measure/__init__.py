"""`gnnplan measure`: micro-benchmarks whose results become a cluster file.

Which file to open:

    measure.py      starts the ranks that measure, or is one of them; fits the cost model's numbers
                    to the samples of all ranks
    microbench.py   the benchmarks of one rank: kernels, training steps, the sampler, exchanges
    rehearsal.py    short trainings that correct the times of single kernels

This package may import all packages of the executor.
"""
