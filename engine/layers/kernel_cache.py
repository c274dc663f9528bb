"""Where compiled kernels are kept: a folder for each state of the kernels' sources.

numba looks only at the file that a kernel is written in before it takes one from its cache, not at
the files that the kernel's helpers come from: after a change there, or an upgrade, it would run old
code. A digest of all of these files names the folder, so a change finds it empty.
"""

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numba

_ENGINE = Path(__file__).parents[1]
_SOURCES = (
    *("layers/cpu_simd.py", "layers/cpu_attention_tiles.py"),
    *("layers/cpu_paged_attention.py", "layers/cpu_tokenwise.py"),
    *("quant/*simd.py", "quant/*_kernels.py"),
)
_PREFIX = "headrace-kernels-"


@functools.cache
def choose_cache_folder() -> Path:
    """Set numba's cache folder: under NUMBA_CACHE_DIR where it is set, else beside the kernels,
    else the user's cache folder, else a temporary one (compiled anew by each process)."""
    name = _PREFIX + sources_digest()
    chosen = numba.config.CACHE_DIR
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for parent in [Path(chosen)] if chosen else [Path(__file__).parent / "__pycache__", home]:
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            break
    else:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # A chosen folder may be a node's, shared with workers of another version.
    for stale in () if chosen else folder.parent.glob(f"{_PREFIX}*"):
        if stale != folder and folder.name == name:
            shutil.rmtree(stale, ignore_errors=True)
    numba.config.CACHE_DIR = str(folder)
    return folder


def sources_digest() -> str:
    """Of every file that kernels are written in or take helpers from: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for pattern in _SOURCES:
        for path in sorted(_ENGINE.glob(pattern)):
            # With its name: what moves from the end of one to the start of the next is a change.
            digest.update(f"{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
