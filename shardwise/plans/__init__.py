"""Plans, presets, validation, plan files, memory, traffic and the schedule: pure data, no torch."""

from shardwise.plans.file import dump_plan, load_plan
from shardwise.plans.plan import Override, Plan, Precision, StatePlan

__all__ = ["Override", "Plan", "Precision", "StatePlan", "dump_plan", "load_plan"]
