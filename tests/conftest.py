"""Settings of every test run."""

import torch

torch.set_num_threads(1)  # small shapes: more threads cost more than they bring, and tests run side by side
