"""What tests of preprocessing share: each of the decoders in turn, as where the faster ones are not installed."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator

import pytest

from tests.entrypoints.ranks import from_clean_forks

# data workers are forks: of a process with threads they may hang
multiprocessing.set_start_method("forkserver", force=True)
from_clean_forks()

DECODERS = {
    "simplejpeg": "simplejpeg",
    "OpenCV": "OpenCV (simplejpeg is not installed)",
    "Pillow": "Pillow (neither simplejpeg nor OpenCV is installed)",
}
"""What jpeg.find_decoder calls them."""


@pytest.fixture(params=DECODERS)
def decoder(request, monkeypatch) -> Iterator[str]:
    """The name of the only decoder that can be imported, beside Pillow and what is slower."""
    from training.data.decode import jpeg

    missing = {"simplejpeg": [], "OpenCV": ["simplejpeg"], "Pillow": ["simplejpeg", "cv2"]}[request.param]
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    for cached in (jpeg.opencv, jpeg.find_decoder):
        cached.cache_clear()
    yield request.param
    for cached in (jpeg.opencv, jpeg.find_decoder):
        cached.cache_clear()
