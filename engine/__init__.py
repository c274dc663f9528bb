"""The engine: token ids in, token ids out. Nothing here knows Redis, queues or jobs.

Import this before torch: torch's OpenMP threads (libgomp) wait by spinning, by default for about 20
ms. Where other processes want the same cores, that multiplies the time of every step (measured with
ten processes on two cores: 92 s instead of 18), so the spinning is limited to about 0.1 ms, longer
than the gaps between the operations of a step. GOMP_SPINCOUNT in the environment wins.

oneDNN compiles a matmul for each shape that it meets and keeps the last 1,024, in a cache of its
own and in torch's. A continuous batch has another number of rows at almost every step, so both fill
up: at up to 1.5 MB a shape a worker grew by 0.6 GB within minutes and looked like a leak. Both are
held to a quarter; ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY in the environment win.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")
