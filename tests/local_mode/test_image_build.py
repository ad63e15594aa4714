"""What docker/build asks of a registry and of a package index. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from tests.conftest import ROOT


def test_bases_are_pulled_by_digest(tmp_path):
    """An engine without images: what the build asks the registry for."""
    (tmp_path / "docker").write_text(
        f'#!/bin/sh\n[ "$1" = pull ] && echo "$2" >> {tmp_path}/pulled\n[ "$1" = version ]\n'
    )
    (tmp_path / "docker").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_BASE")}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / "docker/build", "local"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "cannot be pulled" in done.stderr
    named = "python:{}.{}-slim-bookworm".format(*sys.version_info)
    assert re.fullmatch(rf"{named}@sha256:[0-9a-f]{{64}}\n", (tmp_path / "pulled").read_text())


def test_a_bases_own_opencv_stays():
    """Another version may take another numpy than the base's torch."""
    base = {"python": "3.10", "machine": "x86_64", "glibc": "2.31", "packages": {"opencv_python": "4.8.1.78"}}
    command = [sys.executable, ROOT / "docker/wheels.py", "nowhere", "opencv-python-headless==4.14.0.94"]
    done = subprocess.run(command, input=json.dumps(base), capture_output=True, text=True)
    assert done.stdout == "wheels: none, the base has opencv-python-headless==4.14.0.94\n", done.stderr
