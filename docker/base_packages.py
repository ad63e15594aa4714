"""Runs in a base image with its Python alone: prints the platform and the installed packages as JSON."""

import importlib.metadata
import json
import os
import platform
import sys

print(
    json.dumps(
        {
            "python": "{}.{}".format(*sys.version_info[:2]),
            "machine": platform.machine(),
            "glibc": os.confstr("CS_GNU_LIBC_VERSION").split()[1],
            "packages": {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()},
        }
    )
)
