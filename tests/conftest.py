# SPDX-License-Identifier: Apache-2.0
"""Settings of the whole test run."""

import os

# One thread, set before torch is imported: on a shared machine two threads that wait for each other at every small
# operation are many times slower than one, and one thread makes results repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
