"""Cache layout (bytes, from the config), page and slot accounting, and the index of reusable prefixes. No torch, no device."""

from deepinfer_core.cache.layout import CacheLayout, CacheLayoutError, CacheReport, Ring, Section, state_slots
from deepinfer_core.cache.pages import CacheAccountingError, PagePool, SlotPool

__all__ = [
    "CacheAccountingError",
    "CacheLayout",
    "CacheLayoutError",
    "CacheReport",
    "PagePool",
    "Ring",
    "Section",
    "SlotPool",
    "state_slots",
]
