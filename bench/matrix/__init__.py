"""The bench matrix: workloads × arms × budgets × seeds on real servers, one JSON a cell.

What is to be run stands in a TOML file here; `plan`, `run`, `report` and `compare` of
`python -m bench` work from that and from the cells' JSON files alone.
"""
