"""NKI's dtypes: plain names, as the documentation types them, and how each is stored here.

Narrow types are truly narrow: every store rounds to nearest even, floats to integers also saturate. tfloat32 is kept in
four bytes with 10 bits of mantissa.
"""

import ml_dtypes
import numpy as np

from ringtide.kernels.nki.simulator.errors import DtypeError

_STORED = {
    "bool": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "float16": np.float16,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "tfloat32": np.float32,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
NUMPY = {name: np.dtype(kind) for name, kind in _STORED.items()}
FLOATS = frozenset(name for name in NUMPY if "float" in name)
INTEGERS = frozenset(NUMPY) - FLOATS
SIXTEEN_BIT = frozenset(("bfloat16", "float16"))


def check(dtype) -> str:
    """A dtype's name, from the name or a NumPy dtype. Raises DtypeError."""
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = None
    if name not in NUMPY:
        raise DtypeError(f"dtype: {dtype!r} is none of {', '.join(NUMPY)}")
    return name


def size(dtype: str) -> int:
    """Bytes an element."""
    return NUMPY[dtype].itemsize


def wide(x: np.ndarray, dtype: str) -> np.ndarray:
    """Stored elements as what the engines compute in: float32, or for integers int64 (their results wrap or saturate
    only when stored)."""
    return x.astype(np.float32) if dtype in FLOATS else x.astype(np.int64)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """A computed array as it is stored in `dtype`."""
    to = NUMPY[dtype]
    if x.dtype == to and dtype != "tfloat32":
        return x
    if dtype == "tfloat32":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        even = (bits >> np.uint32(13)) & np.uint32(1)
        rounded = ((bits + np.uint32(0xFFF) + even) & np.uint32(0xFFFFE000)).view(np.float32)
        return np.where(np.isfinite(x), rounded, x).astype(np.float32)
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(to)
    if x.dtype.kind == "f" or x.dtype.kind == "V":
        low, high = np.iinfo(to).min, np.iinfo(to).max
        x = np.asarray(x, np.float64)
        return np.clip(np.rint(np.where(np.isnan(x), 0, x)), low, high).astype(to)
    return x.astype(to)
