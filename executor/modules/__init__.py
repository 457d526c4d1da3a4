"""A user's own torch module, or layer, as a workload that strategies can train.

Open
    read.py           for `with_user_module`: from a file or a live module to a problem
    make.py           to execute a file and call a class; to keep a live module in a file
    names.py          for what the names of parameters mean
    bind.py           for the inputs of `forward`, and the small graphs that it runs on
    sandbox.py        to run the user's code in another process, within limits
    module_state.py   for state that a module keeps between calls
    record.py         for `forward` as torch calls
    cut.py            for how these calls become layers
    evaluate.py       to run recorded calls on other rows
    structure.py      for values that follow from edges alone, on a part of the graph
    pieces.py         for the layers, as strategies call them
    prove.py          for the proof that the layers compute what the module does
    own.py            for the Net of any workload, and layers that the user wrote (layers.Layer)

A module that is a chain of convolutions may be converted to built-in layers. Open
    convert.py        for the guess of the chain, its proof, and the places of its parameters

The room imports the planner and layers/."""
