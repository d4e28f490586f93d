"""What the checks of the NVIDIA backend share: inputs, one way to call every op, compilation without a GPU."""

import cuda_checks.repository  # noqa: F401 - makes the packages importable from a plain checkout
