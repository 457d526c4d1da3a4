"""The stages that `benchmarks/gpu.py` runs on a GPU, a file each.

    kernels.py     kernels      aggregation, dropout, products, attention against the card's rates
    peers.py       peers        epochs beside PyG's and DGL's
    training.py    one, shared  plan, train, validate: one rank; two and four that share the card
                   further      the same with rounded rows, columns, tiles, the server's memory
                   modules      the same of PyG's modules in modules.py
                   references   the same on the CPU
    marked.py      tests        all tests that are marked `gpu`
    measuring.py   measure      `gnnplan measure`, with its ranges
    streams.py     streams      what recording costs, launches of a step, CUDA graphs
    sampling.py    sampling     draws on the GPU and on the host

Beneath them are record.py (a stage's JSON), clock.py (seconds of kernels), graphs.py (graphs made
on the device), question.py (what is trained), wheels.py (what the machine may lack) and table.py
(pages made of the JSON). predicted.py predicts what was recorded on an H200."""
