"""Makes torch_npu importable on a machine without CANN, and registers the emulated operators."""

from __future__ import annotations

import ctypes
import os
import sys


def prepare_host() -> str:
    """Imports torch_npu (on the CANN stub where CANN is missing) and installs the emulation. "" if all went well, else the reason."""
    from deepinfer_backends.ascend950 import emulation

    if "torch_npu" not in sys.modules:
        reason = _load_stub() if not _has_cann() else ""
        if reason:
            return reason
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        try:
            import torch_npu  # noqa: F401 (registers the npu operators)
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu does not import: {error}. Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before Python starts, and check the wheel"
    emulation.install()
    return ""


def _has_cann() -> bool:
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return True


def _load_stub() -> str:
    from deepinfer_backends.ascend950.tools.build_cann_stub import StubError, cached, load

    try:
        load(cached())
    except StubError as error:
        return str(error)
    return ""
