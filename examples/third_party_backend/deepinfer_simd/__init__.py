"""A DeepInfer backend for CPUs, with ops in vectorised C++."""
