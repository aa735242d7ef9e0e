# SPDX-License-Identifier: Apache-2.0
"""How one request of a stage fails without the others: from the stage's forward to the scheduler."""
