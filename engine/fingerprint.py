"""What a loaded model's answers depend on beside the request, as text and as a short digest.

Two engines with the same digest run the same weights with the same code, types and libraries on the
same kind of processor; in deterministic mode they give the same answer to the same request. The
digest travels with every result, as `system_fingerprint`.
"""

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("headrace", "torch", "numba", "llvmlite", "triton")
_PACKAGE_ROOT = Path(__file__).parents[1]
_SOURCES = (
    *("kernels/*.py", "engine/*.py", "engine/layers/*.py", "engine/models/*.py"),
    "engine/quant/*.py",
)
_INSTRUCTIONS = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve"),
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`model`: digest of the checkpoint's files; `dtype`: of the weights as they are multiplied;
    `processor`: kind of device and what else decides which code a library runs on it."""

    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    backend: str
    processor: str
    deterministic: bool = False

    def __str__(self) -> str:
        """What a checkpoint of a job must share with the worker that goes on with it: without
        deterministic mode the model, its types and the backend; with it everything."""
        parts = [self.model, self.dtype, self.quantization, self.backend]
        parts.append(f"torch{package_versions()['torch']}")
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv-{self.kv_cache_dtype}")
        if self.deterministic:
            parts.append(f"deterministic-{self.digest}")
        return "-".join(parts)

    @property
    def digest(self) -> str:
        """`fp_` and 16 hexadecimal digits of all fields, the versions and the engine's sources."""
        digest = hashlib.blake2b(digest_size=8)
        for name, value in self.parts().items():
            digest.update(f"{name}\0{value}\0".encode())
        return f"fp_{digest.hexdigest()}"

    def parts(self) -> dict[str, str]:
        """Everything that the digest is made of, by name."""
        found = {name: str(getattr(self, name)) for name in self.__slots__}
        return {**found, "sources": sources_digest(), **package_versions()}


@functools.cache
def sources_digest() -> str:
    """Of the files that compute: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE_ROOT.glob(pattern)):
            digest.update(f"{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Of what computes; empty for what is not installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def cpu(threads: int) -> str:
    """Instruction set extensions that libraries look at, and the number of threads that a matmul is
    divided among."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    known = "+".join(name for name in _INSTRUCTIONS if name in flags)
    return f"{platform.machine()}:{known}:{threads} threads"
