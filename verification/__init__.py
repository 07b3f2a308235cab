"""Proof on real processes that a run does not depend on the machines."""
