"""evoke-vllm: EVOKE's retention policy inside stock vLLM's CPU offloading tier.

Nothing needs importing: vLLM finds ``evoke_vllm.spec.EvokeOffloadingSpec`` through ``spec_name``
and ``spec_module_path`` in ``kv_connector_extra_config``.
"""
