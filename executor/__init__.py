"""Trains for real with torch. The planner and the simulator never import it.

Open
    modules/     for a user's own torch module: read, and its weights both ways
    layers/      for one rank's arithmetic: kernels, layers, models
    ranks/       for a rank among others: exchanges, optimizer, checkpoints, memory
    minibatch/   for sampling and the feature store
    strategies/  for one training step of each strategy
    train.py     for the loop over epochs
    launch/      for starting ranks on servers, and saying what went wrong
    measure/     for measuring the numbers of a cluster file
    emit/        for launch files, and partitions in other libraries' formats

A room imports those above it in this list, and the planner."""
