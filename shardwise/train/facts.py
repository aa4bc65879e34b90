"""For cli/explain.py, until it imports ``facts_of`` from where it is: ``model/named.py``."""

from shardwise.model.named import facts_of as facts_of
