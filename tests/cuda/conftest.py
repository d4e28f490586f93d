"""Lets these tests import their helpers as the package `cuda_checks`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
