"""Removes from an environment what only a GPU uses. PyPI's torch for x86-64 is built for CUDA, which is most of its size.

    python cpu_only.py SITE_PACKAGES

Libraries that the loader opens at the import of torch and torchvision stay, so results on a CPU are those of PyPI's torch.
Libraries of the GPU alone go: Triton, cuDNN's engines, cuSOLVER … The packages stay listed as installed, so that pip does not
download them again for a job's requirements.txt. Headers and static libraries go too, because the image has no compiler.
A torch built for the CPU loses its headers only.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

GPU_FOLDERS = ("nvidia", "triton", "cuda")
GPU_FILES = ("torch/lib/libtorch_cuda_linalg.so", "torch/lib/libcaffe2_nvrtc.so")
FOR_COMPILERS = ("torch/include", "torch/share/cmake", "torch/bin/protoc", "torch/lib/*.a")


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    before = size(site)
    importing = [*site.glob("torch/*.so"), *site.glob("torch/lib/libtorch_python.so"), *site.glob("torchvision/*.so")]
    assert importing, f"no torch below {site}"
    needed = loaded(importing, site / "torch/lib")
    for folder in GPU_FOLDERS:
        for file in (site / folder).rglob("*"):
            if not file.is_dir() and file.resolve() not in needed:
                file.unlink()
    for pattern in (*GPU_FILES, *FOR_COMPILERS):
        for found in site.glob(pattern):
            shutil.rmtree(found) if found.is_dir() else found.unlink()
    for folder in sorted(site.rglob("*"), reverse=True):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
    print(
        f"cpu_only: {before:,.0f} MB installed, {size(site):,.0f} MB left after removing what only a GPU or a compiler uses"
    )


def loaded(libraries: list[Path], torch_libraries: Path) -> set[Path]:
    """The given libraries and all that they load.

    Args:
        torch_libraries: torch's folder of libraries, in which torchvision's are resolved.

    Raises:
        SystemExit: a library is missing.
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(torch_libraries)}
    found, missing = {library.resolve() for library in libraries}, set()
    for library in libraries:
        command = ["ldd", str(library)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        found |= {Path(path).resolve() for path in re.findall(r"=> (/\S+)", listing)}
        missing |= set(re.findall(r"(\S+) => not found", listing))
    missing -= {library.name for library in found}  # the loader finds open libraries by name
    if missing:
        sys.exit(f"torch needs {', '.join(sorted(missing))}, which neither the packages nor the base image hold")
    return found


def size(folder: Path) -> float:
    """In MB."""
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6


if __name__ == "__main__":
    main()
