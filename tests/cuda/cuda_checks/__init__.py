"""What the checks of the NVIDIA backend share: inputs, one way to call every op, compilation without a GPU."""
