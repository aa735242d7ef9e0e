# SPDX-License-Identifier: Apache-2.0
"""What the tests, the benchmarks and a trial without the real weights need: small random checkpoints."""
