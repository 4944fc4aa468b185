"""A small Kubernetes for the rendered YAML: pods are containers of Docker's, and there is no API server.

Who calls whom: tests talk to ``Cluster``, which has one event loop. ``workloads`` make pods and tell them to end; a
``pod`` places itself (``nodes``), waits for its ``volumes``, and keeps its container going (``pod_spec``, ``probes``).
``services`` tell ``names`` and iptables which pods are ready; ``policies`` are rules of iptables.
"""
