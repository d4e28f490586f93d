"""Cache layout (bytes, from the config), page and slot accounting, and the index of reusable prefixes. No torch, no device."""

from deepinfer_core.cache.layout import CacheLayout, CacheLayoutError, CacheReport, Ring, Section, state_slots
from deepinfer_core.cache.pages import CacheAccountingError, PagePool, SlotPool
from deepinfer_core.cache.prefix import Hit, PrefixIndex, Reuse, choose_hit

__all__ = [
    "CacheAccountingError",
    "CacheLayout",
    "CacheLayoutError",
    "CacheReport",
    "Hit",
    "PagePool",
    "PrefixIndex",
    "Reuse",
    "Ring",
    "Section",
    "SlotPool",
    "choose_hit",
    "state_slots",
]
