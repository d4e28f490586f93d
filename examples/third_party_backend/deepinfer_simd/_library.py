"""The C++ library behind ctypes: every function with the types of its arguments. Calls release the interpreter lock."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PATH = Path(__file__).with_name("_simd.so")

_KINDS = {"p": "q", "i": "q", "d": "d"}

# One letter for each argument of the C++ function of that name: p an address (0 is null), i an int64, d a double.
# A function gets one address, of its arguments in eight bytes each: `OP` in src/call.hpp, or a struct.
SIGNATURES = {
    "simd_attention": "iiiii pipp d ppi pip iiiiii pi pi p iiiiii pip",
    "simd_attention_output": "piiiipppi",
    "simd_compress": "piiipiiiipippdipi",
    "simd_embed": "pipiipi",
    "simd_engram_gate": "piipippdpiiipii",
    "simd_engram_gather": "ppipipi",
    "simd_engram_hash": "piipppip",
    "simd_hc_collapse": "piipiiipi",
    "simd_hc_post": "piipippiiipii",
    "simd_hc_pre": "piipppppddiiiipppppi",
    "simd_index_query": "piiiiippipi",
    "simd_linear": "piiippii",
    "simd_moe": "pppiiipipdipi",
    "simd_moe_gate": "piiippiidppi",
    "simd_pack": "iiipipippi",
    "simd_quantize": "pipdiipi",
    "simd_rms_norm": "piipdiipii",
    "simd_select": "pp iii p iiiiii p ii pp i p ii p p iii",
    "simd_store": "piiiipdppiipiiiiiipi",
    "simd_stream_mean": "piiiiipi",
    "simd_window_key": "piipdppiiipi",
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
def load() -> SimpleNamespace:
    """The functions of the library. Raises OSError if it cannot be loaded, AttributeError if it is of another version."""
    library = ctypes.CDLL(str(PATH))
    library.simd_missing.argtypes, library.simd_missing.restype = [], ctypes.c_char_p
    functions = {name: _packed(getattr(library, name), kinds) for name, kinds in SIGNATURES.items()}
    return SimpleNamespace(simd_missing=library.simd_missing, **functions)


def _packed(function: Any, kinds: str) -> Callable[..., None]:
    """The C++ function as a function of its arguments. ctypes converts each in 0.1 us, `struct` twenty in 0.2 us."""
    function.argtypes, function.restype = [ctypes.c_char_p], None
    pack = struct.Struct("=" + "".join(_KINDS[kind] for kind in kinds if kind != " ")).pack

    def call(*arguments: float) -> None:
        function(pack(*arguments))

    return call
