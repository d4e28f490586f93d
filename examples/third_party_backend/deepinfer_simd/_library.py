"""The C++ library behind ctypes: every function with the types of its arguments. Calls release the interpreter lock."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("_simd.so")

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}

# One letter for each argument of the C++ function of that name: p an address, i an int64, d a double.
SIGNATURES = {
    "simd_rms_norm": "piipdiipii",
    "simd_quantize": "pipdiipi",
    "simd_window_key": "piipdppiiipi",
    "simd_store_window": "pipiipiii",
    "simd_hc_pre": "piipppppddiiiipppppi",
    "simd_hc_post": "piipippiiipii",
    "simd_hc_collapse": "piipiiipi",
    "simd_attention": "p",
    "simd_pack": "iiipipippi",
    "simd_linear": "piiippii",
    "simd_attention_output": "piiiipppi",
    "simd_moe": "pppiiipipdipi",
    "simd_moe_gate": "piiippiidppi",
    "simd_engram_gate": "piipippdpiiipii",
}


class PackedWeight(ctypes.Structure):
    """`Weight` in src/products.hpp."""

    _fields_ = [
        ("format", ctypes.c_int64), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64), ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    ]  # fmt: skip


_REBUILD = "rebuild it on this machine with `pip install --force-reinstall --no-deps deepinfer-backend-simd`."


def problem() -> str:
    """Why the library cannot be used here, and what to do; "" if it can."""
    if not PATH.exists():
        return f"its library {PATH.name} was not built: install a C++17 compiler (g++) and {_REBUILD}"
    try:
        missing = load().simd_missing().decode()
    except (OSError, AttributeError) as error:
        return f"its library cannot be loaded ({error}): {_REBUILD}"
    return f"its library was built for a CPU with {missing}, which this one lacks: {_REBUILD}" if missing else ""


@cache
def load() -> ctypes.CDLL:
    """The library with typed functions. Raises OSError if it cannot be loaded, AttributeError if it is of another version."""
    library = ctypes.CDLL(str(PATH))
    library.simd_missing.argtypes, library.simd_missing.restype = [], ctypes.c_char_p
    for name, kinds in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], None
    return library
