"""Precisions: the number formats that rows can have, under their names in --dtype.

Everything that depends on the format of rows is here, or is looked up by name: a device has the
rates gemm_NAME, gather_NAME and product_code_NAME for some formats (cluster/spec.py). Weights, the
gradients of weights and the optimizer's state are float32 or float64 in every precision.
"""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    """A format of `itemsize` bytes per number, which is exact for whole numbers up to 2^digits."""

    name: str
    itemsize: int  # [B]
    digits: int  # of the significand, in bits
    rounds: str = ""  # sentence that a plan prints about rounding; '': rounds no more than float32

    @property
    def rounds_rows(self) -> bool:
        """Whether rows have fewer digits than the weights, which makes training lossy."""
        return self.itemsize < 4

    @property
    def torch(self) -> str:
        """The name of the torch dtype; TF32 is float32 in torch, with another matrix product."""
        return "float32" if self.itemsize == 4 else self.name

    @property
    def weights(self) -> Precision:
        """The precision of weights, of their gradients and of the loss."""
        return FLOAT64 if self == FLOAT64 else FLOAT32

    @property
    def coarseness(self) -> str:
        """The number of digits in words, for messages that refuse a sum in this precision."""
        return f"{self.name}'s {self.digits} bits"


FLOAT32 = Precision("float32", 4, 24)
FLOAT64 = Precision("float64", 8, 53)
ROUNDED_PRODUCTS = "Rows are float32, and GPUs round the factors of products to 10 bits (TF32)"
TF32 = Precision("tf32", 4, 24, ROUNDED_PRODUCTS)
HALF_ROWS = "Rows are bfloat16, half the bytes; weights, optimizer and all-reduces are float32"
BFLOAT16 = Precision("bfloat16", 2, 8, HALF_ROWS)
PRECISIONS = {each.name: each for each in (FLOAT32, FLOAT64, TF32, BFLOAT16)}
