"""A user's own torch module, or layer, as a workload that strategies can train.

Open
    read.py           for `with_user_module`: a file or a live module -> a problem
    make.py           for how a file is executed and a class called; and a live module's file
    elsewhere.py      for what it makes in the process of a rank, and limits on what it takes
    bind.py           for what forward is given, by the names of its parameters; small graphs
    record.py         for forward as the calls of torch that it makes
    cut.py            for how these calls become layers
    evaluate.py       for running calls on other rows, and sparse matrices
    structure.py      for what is computed of edges alone, on a part of the graph
    pieces.py         for these layers, as strategies call them
    kept.py           for what it keeps between calls, and its copies lack
    prove.py          for the proof that they compute what the module does
    nets.py           for the Net of any workload
    own.py            for a layer that the user wrote against layers.Layer

Where a module is a chain of convolutions that our own layers compute too, open
    convert.py        for the guess, the proof that they do, and where our Net has which parameter

It imports the planner and layers/."""
