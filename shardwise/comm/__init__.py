"""Process groups from the grid, lanes that run transfers beside compute, and the hops."""
