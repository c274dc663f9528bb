"""The engine: token ids in, token ids out. Nothing here knows Redis, queues or jobs.

Import this before torch: torch's OpenMP threads (libgomp) wait by spinning, by default for about 20
ms. Where other processes want the same cores, that multiplies the time of every step (measured with
ten processes on two cores: 92 s instead of 18), so the spinning is limited to about 0.1 ms, longer
than the gaps between the operations of a step. GOMP_SPINCOUNT in the environment wins.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
