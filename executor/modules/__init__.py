"""A user's own torch module, or layer, as a workload that strategies can train.

Open
    read.py           for `with_user_model`: from a file or a live module to a problem; and for the
                      Net of any workload, and layers that the user wrote (layers.Layer)
    make.py           to execute a file and call a class, within limits; to keep a live module
    bind.py           for the inputs of `forward`, by the names of its parameters, and the small
                      graphs that it runs on
    record.py         for `forward` as torch calls
    rewrite.py        for sizes, equal calls, edges whose ends `forward` computes apart, and norms
    cut.py            for how these calls become layers
    evaluate.py       to run recorded calls on other rows
    structure.py      for values that follow from edges alone, on a part of the graph
    pieces.py         for the layers, as strategies call them
    branches.py       for branches on the graph, which must be as they were recorded
    prove.py          for the proof that the layers compute what the module does, without state that
                      the module keeps between calls

A module that is a chain of convolutions may be converted to built-in layers. Open
    convert.py        for the guess of the chain, its proof, and the places of its parameters

The room imports the planner and layers/."""
