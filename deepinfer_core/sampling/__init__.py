"""Sampling: parameters, seeds, and the sampler that turns logits into tokens. See docs/sampling.md."""

from deepinfer_core.sampling.blacklist import parse_blacklist
from deepinfer_core.sampling.params import SamplingParams, defaults_from

__all__ = ["SamplingParams", "defaults_from", "parse_blacklist"]
