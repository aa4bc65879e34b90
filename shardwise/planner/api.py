"""For the package's lazy names, until they name ``shardwise.planning``, where these are."""

from shardwise.planning import plan as plan
from shardwise.planning import request as request
from shardwise.planning import simulate as simulate
