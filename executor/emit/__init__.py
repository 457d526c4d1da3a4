"""Writes a plan for other people's programs: launch files, and partitions.

    launch.py       what a launch file needs of a plan; bash scripts for torchrun and Slurm
    kubernetes.py   a manifest: an Indexed Job and its headless Service
    partitions.py   the graph in a part per rank, written by DGL's and PyG's own writers

Launch files are made of the plan alone, without its graph and without torch.
"""
