"""The machine that a measurement was made on, in words."""

from pathlib import Path


def describe_cpu() -> str:
    """The CPU's name, and what it multiplies natively beside float32."""
    name, flags = "unknown CPU", set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    except OSError:
        return name
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    return f"{name} ({', '.join(flag for flag in known if flag in flags)})"
