"""A real `vllm serve` process, its client and the demo's arms, for every bench and gate."""
