"""P3: layer 1 on feature columns, the other layers data parallel, on mini-batches.

p3.py       the strategy: what it does (with the drawing), a batch's operations, their order
slices.py   knobs; which rank has which feature columns, and who adds up partial rows with whom
memory.py   bytes that a rank holds, and what a batch's operations do to them
"""
