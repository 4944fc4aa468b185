"""Serving on simulated GPUs: what the services' cores are given instead of shells, compute and network.

    clock.py      discrete events in virtual time; nothing here reads a wall clock
    cluster.py    a cluster file (clusters/*.toml): hosts, GPUs, NICs, leaves and what each link carries
    fabric.py     the cluster's links as resources, and the path of a transfer through them
    sharing.py    weighted max-min fair rates by progressive filling: a pure function
    flows.py      flows on a clock: they start, end, are aborted or rerouted, and follow each other in chains
    requests.py   requests that come, and what became of each
    gateway.py    the gateway's core: where requests go, and when their tokens come
    monitor.py    the monitor's core: load in, demand out
    latencies.py  how long messages take
    compute.py    what steps take, by their batches; runs of decode steps that are taken together
    engine.py     an instance's engine: the worker's scheduler, stepped on the clock
    instance.py   an instance: its states, its requests, its load
    streams.py    requests as gateways and instances know each other's; token_reporter.py: what an instance tells of
                  them; load_reports.py: when load is told
    kv.py         KV on its way from instances that compute prompts to those that decode them
    pair.py       a live pair: an instance that loads (pair_target.py) and its source (pair_source.py), which carry
                  out what the worker's machines decide (pair_member.py)
    pairs.py      which workers are in which pair
    lambdascale.py    λScale: weights in blocks (blocks.py), from one to many (binomial.py), and receivers that run the
                  model together while it loads (pipelines.py)
    faults.py     workers that die, and come back with nothing
    processes.py  what goes on in virtual time, written in its order
    run_recorder.py   what is seen of a run; run_result.py: what it came to; evaluation.py: systems side by side;
                      search.py: splits and rates
    what_if.py    the settings of a sweep; sweep.py runs them; frontier.py: which are not beaten, the cheapest, and
                  what equally good ones cost; frontier_panels.py draws them
    cli.py        the command; choices.py: what it names, and what cannot be simulated; tables.py: what it shows
    profiles/     what steps of models on GPUs take; architectures.py and make_profiles.py derive them

A transfer is a fluid: between two events every flow has one rate, and rates change at once when flows come, go, or
catch up with what they forward. Resources are one direction of one link each. There are no packets, no slow start and
no latencies; routing below a flow (ECMP) spreads it over a leaf's uplinks. Same calls, same results, to the last bit.
"""
