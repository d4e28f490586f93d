"""The contract between the core and the hardware: what a backend package imports."""

from deepinfer_core.backend.base import API_VERSION, Backend
from deepinfer_core.backend.capabilities import Capabilities, Probe
from deepinfer_core.backend.formats import CacheFormat, Numerics, WeightFormat

__all__ = ["API_VERSION", "Backend", "CacheFormat", "Capabilities", "Numerics", "Probe", "WeightFormat"]
