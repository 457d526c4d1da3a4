"""Writes a plan for other people's programs: launch files, and partitions.

    launch.py       bash scripts for torchrun and Slurm, and a Kubernetes manifest
    partitions.py   the graph in a part per rank, written by DGL's and PyG's own writers

Launch files are made of the plan alone, without its graph and without torch.
"""
