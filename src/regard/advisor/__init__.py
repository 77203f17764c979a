"""Advice on which attention mechanism, mask, positions, cache and kernel to take, by predicted time and memory."""

from .advice import Advice as Advice
from .advice import advise as advise
from .decision_table import Rule as Rule
from .decision_table import decision_table as decision_table
from .mechanisms import Change as Change
from .mechanisms import Mechanism as Mechanism
from .prices import Price as Price
from .workload import Workload as Workload

__all__ = ["Advice", "Change", "Mechanism", "Price", "Rule", "Workload", "advise", "decision_table"]
