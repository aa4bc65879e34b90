"""Plans, presets, validation, plan files, layout rungs and the schedule: pure data, no torch."""

from shardwise.plan.file import dump_plan, load_plan
from shardwise.plan.plan import Override, Plan, Precision, StatePlan

__all__ = ["Override", "Plan", "Precision", "StatePlan", "dump_plan", "load_plan"]
