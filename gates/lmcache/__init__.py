"""The gate of evoke-lmcache: LMCache's own engine, with a small runtime in the place of vLLM.

LMCache's connector for vLLM refuses a CPU, so the runtime is ours: a model from transformers, a
pool of blocks too small for the workload, and the real LMCache engine behind it, storing,
evicting and restoring CPU tensors. Arms, probes, rules, recordings and verdicts are those of the
other gate.
"""
