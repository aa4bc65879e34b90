"""How well the planner predicts: plans on an emulated cluster, simulated and then really trained.

At every rate of the slow link the ranks that will train are probed first, and the planner chooses.
Then its choice and a list of other plans take turns; those that might be the fastest meet in
finals. A prediction is made of probes and of nothing else.

[Note: A machine that changes its pace]
Machines that others share work faster or slower by a fifth within seconds, and by as much within
minutes. So a plan's step takes the median of its steps in several short turns minutes apart, as a
probe's points are medians; and ranks are probed before, between and after the turns. Predictions
are made of these probes' median, and beside that of the first alone, which the choice is made of.
"""
