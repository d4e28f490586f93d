"""Sampling: parameters, seeds, and the sampler that turns logits into tokens. See docs/sampling.md."""

from deepinfer_core.sampling.batch import HostBatch, SamplingBatch, host_batch
from deepinfer_core.sampling.blacklist import parse_blacklist
from deepinfer_core.sampling.packing import pack_device, unpack_host
from deepinfer_core.sampling.params import SamplingParams, defaults_from
from deepinfer_core.sampling.random import request_seed
from deepinfer_core.sampling.sampler import Sampled, Sampler, SamplerOptions, Scores, Verified
from deepinfer_core.sampling.state import RequestRows, SamplingState

__all__ = [
    "HostBatch",
    "RequestRows",
    "Sampled",
    "Sampler",
    "SamplerOptions",
    "SamplingBatch",
    "SamplingParams",
    "SamplingState",
    "Scores",
    "Verified",
    "defaults_from",
    "host_batch",
    "pack_device",
    "parse_blacklist",
    "request_seed",
    "unpack_host",
]
