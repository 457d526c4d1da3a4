"""What `benchmarks/gpu.py` runs on a GPU, a file per stage.

    marked.py      tests        all tests that are marked `gpu`
    kernels.py     kernels      products, aggregation and so on against the card's rates
    measuring.py   measure      `gnnplan measure`, with its ranges
    training.py    one, shared  plan, train, validate: one rank; two and four that share the card
                   further      the same with rounded rows, columns, tiles, the server's memory
    streams.py     streams      what recording costs, launches of a step, CUDA graphs
    sampling.py    sampling     draws on the GPU and on the host
    peers.py       peers        the epoch beside PyG's and DGL's

Beneath them are record.py (a stage's JSON), clock.py (seconds of kernels), question.py (what is
trained), wheels.py (what the machine may lack) and table.py (pages made of the JSON)."""
