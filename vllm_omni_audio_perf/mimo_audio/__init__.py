# SPDX-License-Identifier: Apache-2.0
"""MiMo-Audio: from codes to waveform, chunk by chunk or all at once."""
