"""How the numbers of rows are held: a precision, by the name that --dtype has for it.

What depends on a type of rows is here, or follows from it: a device has rates of its own for some,
gemm_NAME, gather_NAME and product_code_NAME (cluster/spec.py). Weights, their gradients and the
optimizer's state have at least float32.
"""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    """Numbers of `itemsize` bytes, which hold all whole numbers up to 2^digits."""

    name: str
    itemsize: int  # [B]
    digits: int  # of the significand, in bits
    rounds: str = ""  # what is rounded, as a plan says it; '': nothing beside float32

    @property
    def rounds_rows(self) -> bool:
        """Whether rows have fewer digits than their weights, which is lossy."""
        return self.itemsize < 4

    @property
    def torch(self) -> str:
        """Its type in torch, which knows TF32 as a way to multiply float32."""
        return "float32" if self.itemsize == 4 else self.name

    @property
    def weights(self) -> Precision:
        """That of weights, of their gradients, and of the loss."""
        return FLOAT64 if self == FLOAT64 else FLOAT32

    @property
    def coarseness(self) -> str:
        """Why a sum is too much for it, in words."""
        return f"{self.name}'s {self.digits} bits"


FLOAT32 = Precision("float32", 4, 24)
FLOAT64 = Precision("float64", 8, 53)
ROUNDED_PRODUCTS = "Rows are float32, and GPUs round the factors of products to 10 bits (TF32)"
TF32 = Precision("tf32", 4, 24, ROUNDED_PRODUCTS)
HALF_ROWS = "Rows are bfloat16, half the bytes; weights, optimizer and all-reduces are float32"
BFLOAT16 = Precision("bfloat16", 2, 8, HALF_ROWS)
PRECISIONS = {each.name: each for each in (FLOAT32, FLOAT64, TF32, BFLOAT16)}
