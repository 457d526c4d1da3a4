"""Training with torch. The planner and the simulator never import it.

    modules/     a user's own torch module: how it is read, and its weights converted both ways
    layers/      one rank's arithmetic: kernels, layers, models
    ranks/       ranks: communication, optimizer, checkpoints, memory
    minibatch/   sampling and the feature store
    strategies/  one training step of each strategy
    train.py     the loop over epochs
    launch/      starting ranks on servers, and reporting failures
    measure/     measuring the numbers of a cluster file
    emit/        launch files, and partitions in other libraries' formats

A room imports the planner, and the rooms above it in this list."""
