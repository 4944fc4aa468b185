"""What a decision costs in CPU time, by the size of the cluster: the services' own cores, in virtual time.

population.py  models, workers and their instances, and what they report
stopwatch.py   CPU time by state, service and decision
plane.py       the cores of pool, monitor, planner and a gateway, and what passes between them
states.py      what happens: quiet, one more instance, a tenth of the cluster, a worker's death, a burst
growth.py      the figures of several sizes, and how they grow
cli.py         the command
"""
