"""What forward saves for backward: recomputed, or moved to a tier."""
