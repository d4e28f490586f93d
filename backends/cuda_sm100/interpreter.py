"""Exact low-precision arithmetic for Triton's interpreter, so that kernels can be checked on a CPU.

Triton 3.6's interpreter holds bfloat16 and float8 values as raw integers: it adds and multiplies those integers, truncates conversions to
bfloat16, rounds conversions to float8 the wrong way, and has no block-scaled product. `install` replaces its builder by one that computes
such operations in float32 and rounds once, as the GPU's instructions do (nearest even; float8 saturates).
Needs the package ml_dtypes. Only for processes that started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_NUMPY = {
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e5: ml_dtypes.float8_e5m2,
    tl.float16: np.float16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_RAW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)  # types the interpreter stores as integers
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

Handle = interpreter.TensorHandle


def values_of(handle: Any) -> np.ndarray:
    """float32 (or wider) values of a tensor handle, whatever its type."""
    kind = handle.dtype.scalar
    if kind in _RAW:
        return np.ascontiguousarray(handle.data).view(_NUMPY[kind]).astype(np.float32)
    return handle.data


def handle_of(values: np.ndarray, kind: tl.dtype) -> Any:
    """A handle of type `kind`, each value rounded once."""
    if kind not in _RAW:
        return Handle(np.asarray(values).astype(interpreter._get_np_dtype(kind)), kind)
    values = np.asarray(values, np.float32)
    if kind in _LARGEST:
        values = np.clip(values, -_LARGEST[kind], _LARGEST[kind])
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.ascontiguousarray(values.astype(_NUMPY[kind]))
    return Handle(rounded.view(np.uint16 if kind == tl.bfloat16 else np.uint8).reshape(values.shape), kind)


def scaled_values(data: Any, scale: Any, name: str, axis: int) -> np.ndarray:
    """float32 values of an operand of a block-scaled product, the dimension `axis` that is summed over last."""
    if name == "E2M1":
        packed = np.moveaxis(data.data.view(np.uint8), axis, -1)
        codes = np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)
        values = np.where(codes < 8, 1, -1).astype(np.float32) * _E2M1[codes & 7]
    else:
        values = np.moveaxis(values_of(data), axis, -1).astype(np.float32)
    if scale is None:
        return values
    factors = np.ldexp(np.float32(1), scale.data.view(np.uint8).astype(np.int32) - 127)
    return values * np.repeat(factors, 32, -1)


class ExactBuilder(interpreter.InterpreterBuilder):
    """The interpreter's builder with the arithmetic of the small types repaired."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        kind = dst_type.scalar
        if src.dtype.scalar == kind or not {src.dtype.scalar, kind} & set(_RAW):
            return super().cast_impl(src, dst_type)
        return handle_of(values_of(src), kind)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return handle_of(values_of(src), dst_type.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        product = np.matmul(values_of(a), values_of(b), dtype=np.float32)
        return Handle(product + d.data, d.dtype.scalar)

    def create_dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, fast_math: bool, *rest: Any
    ) -> Any:
        acc = rest[-1]
        left = scaled_values(lhs, lhs_scale, lhs_format.name, -1)
        right = scaled_values(rhs, rhs_scale, rhs_format.name, -2)
        return Handle((left @ np.swapaxes(right, -1, -2) + acc.data).astype(np.float32), tl.float32)

    def get_bf16(self, value: float) -> Any:
        return handle_of(np.array([value]), tl.bfloat16)


def _in_float32(name: str) -> Callable[..., Any]:
    """The builder's method `name` for operands of any type: small floats are widened, a float32 result is rounded back."""
    plain = getattr(interpreter.InterpreterBuilder, name)

    def method(self: ExactBuilder, *operands: Any) -> Any:
        kinds = [getattr(operand, "dtype", None) for operand in operands]
        small = [kind.scalar for kind in kinds if kind is not None and kind.scalar in _RAW]
        if not small:
            return plain(self, *operands)
        wide = [Handle(values_of(x), tl.float32) if k is not None and k.scalar in _RAW else x for x, k in zip(operands, kinds, strict=True)]
        result = plain(self, *wide)
        return handle_of(result.data, small[0]) if result.dtype.scalar == tl.float32 else result

    return method


_ARITHMETIC = ["fadd", "fsub", "fmul", "fdiv", "minnumf", "maxnumf", "minimumf", "maximumf", "fabs", "fma", "clampf"]
_COMPARISONS = [f"fcmp{order}{relation}" for order in "OU" for relation in ("LT", "GT", "LE", "GE", "EQ", "NE")]
for _name in _ARITHMETIC + _COMPARISONS:
    setattr(ExactBuilder, f"create_{_name}", _in_float32(f"create_{_name}"))


def _refusing_small_floats(apply: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, operands: Any) -> Any:
        for operand in operands if isinstance(operands, tuple) else (operands,):
            if operand.dtype.scalar in _RAW:
                raise TypeError(f"a reduction or scan of {operand.dtype} is not computed here: convert to float32 first")
        return apply(self, operands)

    return checked


def install() -> None:
    """Makes this process's interpreter exact. Idempotent."""
    if isinstance(interpreter.interpreter_builder, ExactBuilder):
        return
    interpreter.interpreter_builder = ExactBuilder()
    interpreter.interpreter_semantic = type(interpreter.interpreter_semantic)(interpreter.interpreter_builder)
    for scope in (interpreter.ReduceOps, interpreter.ScanOps):
        scope.apply_impl = _refusing_small_floats(scope.apply_impl)
    plain_patch = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        # numpy >= 2.4 refuses int() of a one-element array, which is how the interpreter holds loop bounds
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    interpreter._patch_lang_tensor = patch
