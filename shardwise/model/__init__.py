"""From an `nn.Module` to what the planner and the runtime need: units, deferred init, tiling."""
