"""Fault gates: what happens to a server with EVOKE's tier when things go wrong.

Each fault runs on the tiny random model, on a server of its own. Whatever happens, the rule is
the same: no wrong token, no hang, no leak, and an engine that is alive afterwards.
"""

FAULTS_KEY = "gate_faults"
"""Where `kv_connector_extra_config` tells the slow worker what to do."""
