"""How well the planner predicts: plans on an emulated cluster, simulated and then trained.

At every rate of the slow link the ranks that will train are probed first, and the planner chooses a
plan. Then its choice and a list of other plans take turns; those that might be the fastest are
compared again in finals. Predictions use probes and nothing else.

[Note: A machine that changes its pace]
A shared machine becomes faster or slower by a fifth within seconds, and as much within minutes. So
a plan's step time is the median of its steps in several short turns minutes apart, just as a
probe's points are medians, and ranks are probed before, between and after the turns. Predictions
use the median of these probes; those of the first probe alone, which the choice is based on, are
reported as well.
"""
