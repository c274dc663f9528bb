"""The cards: memory that a process really sees, bandwidth, arithmetic, and what each cannot do.

Memory is what the driver reports to a process, not the number on the box (a 16 GB T4 shows 14.6
GiB). Arithmetic is dense, without sparsity, with float32 accumulation. Figures are the vendors'
data sheets; prices are in `prices`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.schemes import Scheme

_GIB = 2**30
_T = 1e12


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator. `flops`: operations a second by type; a missing type cannot be multiplied.

    `link` is the bandwidth to the other cards of a group in one direction, bytes a second.
    `context` is what the driver and the loaded kernels take before the first tensor.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    capability: tuple[int, int]
    link: float
    context: int = _GIB // 2
    is_cpu: bool = False
    vendor: str = "nvidia"
    limits: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=(), repr=False)

    @property
    def float_dtype(self) -> str:
        """The type that unquantized tensors have on this card."""
        if self.is_cpu:
            return "bf16" if self.flops["bf16"] >= self.flops["fp32"] else "fp32"
        return "bf16" if "bf16" in self.flops else "fp16"

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.float_dtype == "fp32" else 2

    def refuses(self, scheme: Scheme) -> str | None:
        """Why the scheme can't run here and what can, or None."""
        if scheme.kind == "float" and scheme.name not in self.flops:
            return f"{self.name} has no {scheme.name}; use {self.float_dtype}"
        if scheme.compute == "int8" and "int8" not in self.flops:
            return f"{self.name} multiplies no int8; use int8 (weights only)"
        if scheme.compute == "fp8" and "fp8" not in self.flops:
            return f"{self.name} multiplies no fp8 (compute capability 8.9 or newer); use int8"
        return None


def _nvidia(
    name: str,
    gib: float,
    gb_per_second: float,
    capability: tuple[int, int],
    *,
    fp32: float,
    fp16: float,
    int8: float,
    fp8: float = 0,
    link: float = 32,
    context: float = 0.5,
    limits: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Card:
    flops = {"fp32": fp32 * _T, "fp16": fp16 * _T}
    if capability >= (8, 0):
        flops["bf16"] = fp16 * _T
    else:
        limits = ("no bf16: float16 with float32 accumulation", "no FlashAttention-2", *limits)
    if int8:
        flops["int8"] = int8 * _T
    if fp8:
        flops["fp8"] = fp8 * _T
    else:
        limits = (*limits, "no fp8")
    return Card(
        name=name,
        memory=round(gib * _GIB),
        bandwidth=gb_per_second * 1e9,
        flops=flops,
        capability=capability,
        link=link * 1e9,
        context=round(context * _GIB),
        limits=limits,
        aliases=aliases,
    )


_NO_PEER = ("no direct link between cards",)

CARDS: tuple[Card, ...] = (
    _nvidia("T4", 14.6, 320, (7, 5), fp32=8.1, fp16=65, int8=130, link=16, context=0.3),
    _nvidia(
        "V100-16", 15.77, 900, (7, 0), fp32=15.7, fp16=125, int8=0, link=150, aliases=("V100",)
    ),
    _nvidia("V100-32", 31.73, 900, (7, 0), fp32=15.7, fp16=125, int8=0, link=150),
    _nvidia("A10", 22.06, 600, (8, 6), fp32=31.2, fp16=125, int8=250),
    _nvidia("A10G", 22.06, 600, (8, 6), fp32=31.5, fp16=70, int8=140),
    _nvidia("A30", 23.5, 933, (8, 0), fp32=10.3, fp16=165, int8=330, link=100),
    _nvidia("L4", 22.03, 300, (8, 9), fp32=30.3, fp16=121, int8=242, fp8=242),
    _nvidia("RTX-3090", 23.57, 936, (8, 6), fp32=35.6, fp16=71, int8=284, aliases=("3090",)),
    _nvidia(
        "RTX-4090",
        23.52,
        1008,
        (8, 9),
        fp32=82.6,
        fp16=165.2,
        int8=660.6,
        fp8=330.3,
        limits=_NO_PEER,
        aliases=("4090",),
    ),
    _nvidia(
        "RTX-5090",
        31.36,
        1792,
        (12, 0),
        fp32=104.8,
        fp16=209.5,
        int8=838,
        fp8=419,
        link=64,
        limits=_NO_PEER,
        aliases=("5090",),
    ),
    _nvidia(
        "A6000",
        47.4,
        768,
        (8, 6),
        fp32=38.7,
        fp16=154.8,
        int8=309.7,
        link=56,
        aliases=("RTX-A6000",),
    ),
    _nvidia("L40S", 44.4, 864, (8, 9), fp32=91.6, fp16=362, int8=733, fp8=733),
    _nvidia("A100-40", 39.4, 1555, (8, 0), fp32=19.5, fp16=312, int8=624, link=300),
    _nvidia(
        "A100-80", 79.15, 2039, (8, 0), fp32=19.5, fp16=312, int8=624, link=300, aliases=("A100",)
    ),
    _nvidia("H100-PCIe", 79.1, 2000, (9, 0), fp32=51, fp16=756, int8=1513, fp8=1513, link=64),
    _nvidia(
        "H100",
        79.1,
        3350,
        (9, 0),
        fp32=67,
        fp16=989.4,
        int8=1979,
        fp8=1979,
        link=450,
        context=0.6,
        aliases=("H100-80",),
    ),
    _nvidia(
        "H200",
        139.8,
        4800,
        (9, 0),
        fp32=67,
        fp16=989.4,
        int8=1979,
        fp8=1979,
        link=450,
        context=0.6,
        aliases=("H200-141",),
    ),
    _nvidia(
        "B200",
        178.3,
        8000,
        (10, 0),
        fp32=75,
        fp16=2250,
        int8=4500,
        fp8=4500,
        link=900,
        context=0.7,
    ),
    Card(
        name="MI300X",
        memory=round(191.7 * _GIB),
        bandwidth=5300e9,
        flops={
            "fp32": 163.4 * _T,
            "fp16": 1307.4 * _T,
            "bf16": 1307.4 * _T,
            "int8": 2614.9 * _T,
            "fp8": 2614.9 * _T,
        },
        capability=(9, 4),
        link=448e9,
        context=round(0.8 * _GIB),
        vendor="amd",
        limits=("kernels are compiled and tested for NVIDIA only",),
    ),
)
DEFAULT_CARDS = ("T4", "A10", "L4", "L40S", "A100-80", "H100", "H200")


def _key(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB`, `a100 80G` and `A100-80` are one."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = re.sub(
        r"^((nvidia|amd|tesla|geforce|instinct)-)+|-hbm\d\w*|-sxm\d?|-pcie(?=-\d)", "", key
    )
    key = re.sub(r"(-\d+)gb?$", r"\1", key)
    return re.sub(r"^rtx(?=\d)", "rtx-", key)


def find_card(name: str) -> Card:
    """A card by name, case and `GB` ignored; `cpu` is this machine. Raises PlanError."""
    if name.strip().lower() == "cpu":
        return this_cpu()
    key = _key(name)
    for card in CARDS:
        if key in (card.name.lower(), *(a.lower() for a in card.aliases)):
            return card
    known = ", ".join(c.name for c in CARDS)
    raise PlanError(f"unknown card {name!r}; known: {known}, cpu")


_CPU_CONTEXT = 400 * 2**20
"""Python, torch, numba and the tokenizer: resident memory of a loaded SmolLM2-135M less its weights
is 407 to 423 MB, whichever the scheme."""
_CORE_FLOPS = (("avx512f", 150e9), ("avx2", 75e9))


def this_cpu() -> Card:
    """The machine this runs on, guessed from its core count and instruction set.

    Rates are rough (150 GFLOP/s a core with AVX-512) until a measurement calibrates them; memory
    is what is free for a process now, within its control group.
    """
    cores = _cpu_quota()
    flags = _cpu_flags()
    fp32 = cores * next((f for flag, f in _CORE_FLOPS if flag in flags), 20e9)
    flops = {"fp32": fp32, "bf16": fp32 / 4}
    if "amx_bf16" in flags:
        flops["bf16"] = 6 * fp32
    elif "avx512_bf16" in flags:
        flops["bf16"] = 2 * fp32
    flops["int8"] = 4 * fp32 if "avx512_vnni" in flags or "avx_vnni" in flags else fp32
    return Card(
        name="cpu",
        memory=_available_memory(),
        bandwidth=min(15e9 * cores, 200e9),
        flops=flops,
        capability=(0, 0),
        link=10e9,
        context=_CPU_CONTEXT,
        is_cpu=True,
        vendor="cpu",
        limits=("rates are a guess until measured",),
    )


def _cpu_quota() -> float:
    try:
        cores: float = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return cores


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _available_memory() -> int:
    """Free memory for a new process: the machine's, or less where the control group has less."""
    free = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    if not free:
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        free.append(page * pages)
    return max(0, min(free))
