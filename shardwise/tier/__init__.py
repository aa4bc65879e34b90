"""Where states rest: pools of memory, budgets, and files on a disk."""
