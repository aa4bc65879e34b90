"""What three papers published of their own clusters, one module a paper."""
