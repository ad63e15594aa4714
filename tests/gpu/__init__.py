"""The GPU suite: every check of the kit that needs a GPU. `make gpu` runs it and writes docs/results/gpu.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "entrypoints"))  # as the toolkit puts the code folder there
