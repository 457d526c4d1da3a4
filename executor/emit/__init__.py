"""Export of a plan to other programs: launch files, and partitions.

    launch.py       bash scripts for torchrun and Slurm, and a Kubernetes manifest
    partitions.py   the graph in one part per rank, written by DGL or PyG

Launch files need only the plan, neither its graph nor torch.
"""
